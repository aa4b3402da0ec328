import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from features import KEY, MODEL, QUESTION, SCHEMA, V1, argument, feature

folder = Path(tempfile.mkdtemp())
about = {"model_id": "weft", "model_name": MODEL, "api_base": V1, "supports_schema": True, "supports_tools": True}
(folder / "extra-openai-models.yaml").write_text(json.dumps([about]))


def llm(*words):
    command = [str(Path(sys.executable).parent / "llm"), "-m", "weft", "--key", KEY, "-o", "max_tokens", "48", *words]
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


@feature
def chat():
    return llm("--no-stream", QUESTION)


@feature
def stream():
    return llm(QUESTION)


@feature
def structured():
    return argument(llm("--schema", json.dumps(SCHEMA), QUESTION))


@feature
def tools():
    """The tools are offered; the model may say what it will."""
    return llm("-T", "llm_version", "--no-stream", QUESTION)
