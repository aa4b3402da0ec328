"""An image, with its steps as they are made: python images.py ["a red circle on a blue background"] [FILE.png].

The small model that comes with Weft draws figures and letters of 32 × 32 pixels; docs/images.md names larger ones.
"""

import base64
import json
import os
import sys
from pathlib import Path

import httpx

url = os.environ.get("SERVER_URL", "http://127.0.0.1:8000")
key = os.environ.get("SERVER_KEY", "none")
prompt = sys.argv[1] if len(sys.argv) > 1 else "a red circle on a blue background"
path = Path(sys.argv[2] if len(sys.argv) > 2 else "image.png")
body = {"prompt": prompt, "seed": 7, "stream": True}
headers = {"authorization": f"Bearer {key}"}
with httpx.stream("POST", f"{url}/v1/images/generations", json=body, headers=headers, timeout=600) as answer:
    answer.raise_for_status()
    for line in answer.iter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["type"] == "image_generation.progress":
            print(f"step {event['step']} of {event['steps']}", end="\r", flush=True)
        elif event["type"] == "image_generation.completed":
            path.write_bytes(base64.b64decode(event["b64_json"]))
            print(f"{path} is written; seed {event['seed']} gives it again")
