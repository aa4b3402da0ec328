"""The LoRA adapters of an engine: directories as PEFT writes them, by the names that requests give."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open

from weft.backends.contract import unknown_adapter
from weft.checkpoint.adapter_files import CONFIG_FILE, DEFAULT_ADAPTER, MAX_CONFIG_BYTES, MAX_RANK, WEIGHTS_FILE
from weft.checkpoint.json_file import read_object
from weft.checkpoint.model_files import ModelFiles
from weft.errors import ModelError
from weft.machine.model_size import Geometry, size_of
from weft.types import Adapter

_NAME = re.compile(r"[\w./:-]{1,128}")
_LAYER = re.compile(r"\.layers\.([0-9]{1,9})\.")
_READS_HIDDEN_STATES = re.compile(r"\.(?:[qkv]|gate|up)_proj\.lora_A\.weight$")


class Adapters:
    """The adapters of an engine, by name. Their numbers are counted: none is used twice, even for the same name."""

    def __init__(self, model_name: str, files: ModelFiles) -> None:
        """Take adapters of a model that is served by this name."""
        self._model_name = model_name
        self._files = files
        self._numbers = itertools.count(1)
        self._by_name: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._by_name.values())

    def checked(self, path: str) -> Path:
        """Return the directory of an adapter of this model, whose files are read. Raises ModelError for what is
        none."""
        folder = Path(path).expanduser().absolute()
        _check_config(folder)
        _check_weights(folder / WEIGHTS_FILE, self._geometry)
        return folder

    def add(self, name: str, folder: Path) -> Adapter:
        """Add an adapter. Raises ModelError for a name that it cannot have."""
        if not _NAME.fullmatch(name):
            raise ModelError(f"{name!r:.200} cannot be an adapter's name: letters, digits and . / : - _ alone.")
        if name in self._by_name or name == self._model_name:
            raise ModelError(f"There is a model {name!r} already.", hint="Give the adapter another name.")
        adapter = self._by_name[name] = Adapter(name=name, number=self._number(folder), path=str(folder))
        return adapter

    def remove(self, name: str) -> None:
        """Remove an adapter. Requests that have begun with it go on."""
        del self._by_name[self._named(name).name]

    def discard(self, adapter: Adapter) -> None:
        """Remove an adapter, unless it was removed already and another may have its name."""
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]

    def chosen(self, name: str | None) -> Adapter | None:
        """Return the adapter that a request names; None: the model as it is. Raises InvalidRequest."""
        if name is None:
            return self._by_name.get(DEFAULT_ADAPTER)
        return self._named(name) if name else None

    def _named(self, name: str) -> Adapter:
        if name not in self._by_name:
            raise unknown_adapter(name, self)
        return self._by_name[name]

    def _number(self, folder: Path) -> int:
        return next(self._numbers)

    @cached_property
    def _geometry(self) -> Geometry | None:
        return size_of(self._files).geometry


def _check_config(folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: there is no {CONFIG_FILE}.", hint="Give the directory that PEFT wrote.")
    facts = read_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    rank, kind = facts.get("r"), facts.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{folder / CONFIG_FILE}: peft_type is {kind!r:.40}, and only LORA is known.")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{folder / CONFIG_FILE}: the rank, r, is {rank!r:.40}; it must be 1 to {MAX_RANK}.")


def _check_weights(file: Path, geometry: Geometry | None) -> None:
    """Raise ModelError where the names and shapes of the tensors do not go with the model, as far as is known."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}.") from error
    if not any(".lora_A." in name for name in shapes):
        raise ModelError(f"{file}: there is no tensor of a LoRA adapter in it.")
    if geometry is None:
        return
    for name, shape in shapes.items():
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= geometry.num_layers:
            raise ModelError(f"{file}: {name} is of a layer that the model, with {geometry.num_layers}, does not have.")
        if _READS_HIDDEN_STATES.search(name) and shape[-1] != geometry.hidden_size:
            raise ModelError(
                f"{file}: {name} is for a model of width {shape[-1]}, and this one's is {geometry.hidden_size}."
            )
