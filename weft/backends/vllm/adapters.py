"""The LoRA adapters that requests may name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from weft.backends.vllm.arguments import MAX_ADAPTER_RANK
from weft.errors import InvalidRequest, ModelError
from weft.types import Adapter

CONFIG_FILE = "adapter_config.json"


class Adapters:
    """Numbers are counted, never made of names: no two adapters can meet in one, and none is used twice."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._numbers = itertools.count(1)
        self._by_name: dict[str, Adapter] = {}
        for name, path in paths.items():
            self.load(name, path)

    def __iter__(self) -> itertools.chain[str]:
        return itertools.chain(self._by_name)

    def load(self, name: str, path: str) -> Adapter:
        """Raises ModelError for what is no adapter that vLLM was started for."""
        if not name or name in self._by_name:
            raise ModelError(f"There is an adapter {name!r} already." if name else "An adapter must have a name.")
        rank = _rank_of(Path(path))
        if rank > MAX_ADAPTER_RANK:
            raise ModelError(f"The adapter {name} has rank {rank}; vLLM was started for {MAX_ADAPTER_RANK} at most.")
        adapter = Adapter(name=name, number=next(self._numbers), path=str(Path(path).absolute()))
        self._by_name[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Requests that have begun with it go on."""
        del self._by_name[self.named(name).name]

    def named(self, name: str) -> Adapter:
        if name not in self._by_name:
            raise InvalidRequest(
                f"There is no adapter {name!r:.200}.",
                hint=f"There are: {', '.join(self._by_name) or 'none'}.",
                param="adapter",
            )
        return self._by_name[name]


def _rank_of(folder: Path) -> int:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        return int(config["r"])
    except OSError as error:
        raise ModelError(
            f"{folder}: {CONFIG_FILE}: {error.strerror}.", hint="Give the directory that PEFT wrote."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: {CONFIG_FILE} does not tell the adapter's rank.") from error
