import gzip
import json

import httpx
from features import ASK, FEW, MODEL, URL, feature, pieces

client = httpx.Client(base_url=URL, timeout=60)
asked = {"messages": ASK, "max_tokens": FEW}


@feature
def models():
    return client.head("/v1/models").status_code == 200 and client.get("/v1/models").json()["data"]


@feature
def chat():
    """No model is named, and the body is compressed."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps(asked).encode())
    return client.post("/v1/chat/completions", content=body, headers=headers).raise_for_status().json()["choices"]


@feature
def stream():
    with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return pieces(json.loads(line)["choices"][0]["delta"].get("content") for line in lines)


@feature
def completions():
    """By llama.cpp's interface."""
    return client.post("/completion", json={"prompt": "One, two,", "n_predict": 8}).raise_for_status().json()["content"]


@feature
def count_tokens():
    answer = client.post("/tokenize", json={"model": MODEL, "prompt": "The sea is calm."}).raise_for_status()
    return answer.json()["count"]
