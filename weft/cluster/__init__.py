"""Replicas of a model on any number of machines, behind edges that hold the journals.

`weft.cluster:app` is the application for Ray Serve (`weft/cli/ray_serve.py`), which is imported when it is asked for.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "app":
        return import_module("weft.cli.ray_serve").app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
