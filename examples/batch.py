"""A file of requests, answered as a batch: python batch.py [QUESTIONS.txt].

A line of the file is a question. The server works on a batch beside its other requests, at the lowest priority, and
goes on with it after a restart.
"""

import io
import json
import os
import sys
import time
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
questions = [
    "What is the capital of France?",
    "What is the capital of Germany?",
    "What is the capital of Japan?",
]
if len(sys.argv) > 1:
    questions = Path(sys.argv[1]).read_text().splitlines()
lines = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "smollm2",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 32,
        },
    }
    for number, question in enumerate(questions)
]
text = "\n".join(json.dumps(line) for line in lines)
file = client.files.create(file=("questions.jsonl", io.BytesIO(text.encode())), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total}")
for line in sorted(client.files.content(batch.output_file_id).text.splitlines()):
    result = json.loads(line)
    answer = result["response"]["body"]["choices"][0]["message"]["content"]
    print(questions[int(result["custom_id"])], "->", answer)
