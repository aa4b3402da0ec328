import os
import subprocess
import sys
import tempfile
from pathlib import Path

from features import KEY, MODEL, QUESTION, V1, feature

settings = {"API_BASE_URL": V1, "OPENAI_API_KEY": KEY, "DEFAULT_MODEL": MODEL, "OPENAI_USE_FUNCTIONS": "false"}
environment = {**os.environ, "HOME": tempfile.mkdtemp(), **settings}


def sgpt(*words):
    command = [str(Path(sys.executable).parent / "sgpt"), "--no-cache", "--no-md", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


@feature
def stream():
    return sgpt("--model", MODEL, f"{QUESTION} Say one word.")
