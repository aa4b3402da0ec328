"""A damaged model is loaded or refused with an error that names the trouble: it crashes nothing, and takes no memory.

A case is one random change of the bytes of a file, or of one value of the JSON in it. TEST_EFFORT=10 tries ten times as
many; `case` damages the same file again, given its seed.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.effort import EFFORT
from tests.quantised_models import save_quantised
from tests.tiny_adapters import save_adapter
from weft.checkpoint.tokenizer_assets import text_assets
from weft.errors import ConfigError, ModelError
from weft.hub.resolve import resolve
from weft.machine.model_size import quantised_bytes, size_of
from weft.model.loader import load_weights, open_model
from weft.model.lora import read_adapter
from weft.options import CacheOptions, Config, ModelOptions
from weft.text.tokenizer import Tokenizer
from weft.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = 40 * EFFORT
"""Cases of each file: 160 of GGUF, 80 each of AWQ, GPTQ and adapters, 160 of compressed-tensors, 240 of others."""
ROOM = 256 << 20
"""Address space that a load may take: a tiny model has some hundred kilobytes."""
SIZES = (0, 1, 2, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        0.5,
        1e30,
        1 << 31,
        1 << 40,
        1 << 63,
        10**400,
        "",
        "0",
        "llama",
        "F32",
        "x" * 5000,
    ),
    *([], [0], [1 << 62, 1 << 62], ["a"] * 1000, {}, {"a": {}}, {"rope_type": "yarn"}, [[[[[]]]]]),
)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Change the bytes of a file, most often in its first part, where formats have their header."""
    at = rng.randrange(len(content) if rng.random() < 0.2 else min(len(content), 6000))
    change = rng.randrange(5)
    if change == 0:
        return content[:at]
    if change == 1:
        return content[:at] + rng.randbytes(rng.randint(1, 16)) + content[at + rng.randrange(16) :]
    if change == 2:
        return content[:at] + rng.choice(SIZES).to_bytes(8, "little") + content[at + 8 :]
    if change == 3:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return content[:at] + content[at + rng.randint(1, 64) :]


def revalued(value: Any, rng: random.Random) -> Any:
    """Change one value of a JSON object, somewhere in it: another value, no value, or a key that is not there."""
    if rng.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return rng.choice(VALUES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], revalued(value[at], rng), *value[at + 1 :]]
    key = rng.choice(list(value))
    change = rng.random()
    if change < 0.1:
        return {name: held for name, held in value.items() if name != key}
    if change < 0.2:
        return value | {key + "x": value[key]}
    return value | {key: revalued(value[key], rng)}


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    return json.dumps(revalued(json.loads(content), rng)).encode() if rng.random() < 0.8 else damaged(content, rng)


def damaged_safetensors(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return damaged(content, rng)
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(revalued(json.loads(content[8 : 8 + length]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".gguf": damaged,
    ".json": damaged_json,
    ".safetensors": damaged_safetensors,
}


@contextmanager
def no_large_allocation() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def write_anew(file: Path, content: bytes) -> None:
    """Write a file in the place of one. A file that is overwritten is brought to the disk at once by some file systems,
    which takes ten times as long."""
    file.unlink()
    file.write_bytes(content)


def case(file: Path, load: Callable[[], object], seed: int) -> bool:
    """Damage a file, load what it belongs to, and mend it; returns whether it was refused."""
    content = file.read_bytes()
    write_anew(file, DAMAGES[file.suffix](content, random.Random(seed)))
    try:
        with no_large_allocation():
            load()
    except (ModelError, ConfigError) as error:
        assert str(error)
        return True
    except Exception as error:
        pytest.fail(f"{file.name} damaged by seed {seed}: {error!r}")
    finally:
        write_anew(file, content)
    return False


def check(file: Path, load: Callable[[], object]) -> None:
    load()
    refused = sum(case(file, load, seed) for seed in range(CASES))
    assert refused > CASES // 10, "the damage reached nothing that is read"


def load_model(path: Path) -> None:
    files = resolve(str(path))
    Tokenizer.from_assets(text_assets(files))
    Worker(Config(model=ModelOptions(image_model="none"), cache=CacheOptions(num_blocks=32)), files)
    if (stored := size_of(files)).weights.is_quantised:
        with open_model(files) as (config, source):
            quantised_bytes(config, stored.weights, "", torch.bfloat16, on_gpu=True)
            # As a GPU holds the weights.
            load_weights(files, config, source, dtype=torch.bfloat16, device=torch.device("cpu"), linears="keep")


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0", "Q4_K"])
def test_gguf(kind: str, tiny_gguf: Callable[[str, str], Path], tmp_path: Path) -> None:
    file = Path(shutil.copy(tiny_gguf("wide" if kind == "Q4_K" else "smollm2", kind), tmp_path))
    check(file, lambda: load_model(file))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_directory(name: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    check(folder / name, lambda: load_model(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "w4a16", "w8a8"])
def test_quantised(method: str, name: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = save_quantised(tiny_model, tmp_path / "model", method)
    check(folder / name, lambda: load_model(folder))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter(name: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = save_adapter("smollm2", tmp_path / "adapter")
    with open_model(resolve(str(tiny_model))) as (config, _):
        check(folder / name, lambda: read_adapter(folder, config, torch.float32))
