"""Reads the JSON files of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ModelError

MAX_TEXT_BYTES = 128 << 20


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path}: {size} bytes are too many; at most {max_bytes} are read.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 text.") from error


def read_object(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    return parse_object(read_text(path, max_bytes), path)


def read_object_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def parse_object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, not {type(value).__name__}.")
    return value
