import json
import subprocess

from features import ASK, FEW, MODEL, QUESTION, URL, V1, feature, pieces


def curl(*words):
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--fail-with-body", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def post(url, body, *words):
    return curl(url, "-H", "Content-Type: application/json", "-d", json.dumps(body), *words)


asked = {"model": MODEL, "messages": ASK, "max_tokens": FEW}


@feature
def models():
    assert "200" in curl("--head", URL)
    return json.loads(curl(f"{V1}/models"))["data"]


@feature
def chat():
    return json.loads(post(f"{V1}/chat/completions", asked, "--compressed"))["choices"][0]["message"]["content"]


@feature
def stream():
    lines = post(f"{V1}/chat/completions", asked | {"stream": True}, "--no-buffer").split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return pieces(event["choices"][0]["delta"].get("content") for event in events)


@feature
def responses():
    return json.loads(post(f"{V1}/responses", {"model": MODEL, "input": QUESTION, "max_output_tokens": FEW}))["output"]


@feature
def images():
    return json.loads(post(f"{V1}/images/generations", {"prompt": "a red square"}))["data"]
