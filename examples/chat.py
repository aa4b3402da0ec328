"""A streamed chat: python chat.py ["What is the capital of France?"]."""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SERVER_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SERVER_KEY", "none"),
)
question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": question}],
    temperature=0,
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")
