"""Tensors that clients send: prompt embeds, and additional information for a model.

Nothing is copied on the way: decoded from msgpack, the data is a view into the message, and `array` a view into that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from weft.errors import InvalidRequest, in_full

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MAX_BYTES = 100_000_000
MAX_ENTRIES = 100
MAX_VALUES = 1024
"""Values of one entry."""
MAX_DIMENSIONS = 8

BFLOAT16 = "bfloat16"
STORED_AS = {"float32": "<f4", "float16": "<f2", BFLOAT16: "<u2"}
"""The numpy type of each dtype; its last digit is the size in bytes. Numpy has no bfloat16: its bits are integers."""

BFLOAT16_EXPONENT = 0x7F80
"""The exponent bits: all of them are set in an infinity or a NaN, and in no other value."""

Value = bool | int | float | str


class Tensor(Struct, frozen=True, kw_only=True):
    """A tensor is its values row by row, little-endian."""

    data: memoryview
    shape: tuple[int, ...]
    dtype: str
    sha256: str = ""
    """The digest of the data, in hexadecimal; empty: not given."""

    def array(self) -> NDArray[Any]:
        """Return a view of the data of a tensor that was checked."""
        import numpy as np  # servers that take no tensors start without it

        return np.frombuffer(self.data, STORED_AS[self.dtype]).reshape(self.shape)

    def check_data(self, field: str) -> None:
        if self.data.nbytes > MAX_BYTES:
            raise _wrong(f"{field}.data", f"it has {self.data.nbytes} bytes; at most {MAX_BYTES}")
        if self.dtype not in STORED_AS:
            raise _wrong(f"{field}.dtype", f"it is {self.dtype!r:.40}; possible are {', '.join(STORED_AS)}")
        wanted = math.prod(self.shape) * int(STORED_AS[self.dtype][-1])
        if self.data.nbytes != wanted:
            raise _wrong(f"{field}.data", f"it has {self.data.nbytes} bytes; its shape and dtype ask for {wanted}")
        if self.sha256 and hashlib.sha256(self.data).hexdigest() != self.sha256.lower():
            raise _wrong(f"{field}.sha256", "it does not match the data")
        if not self._is_finite():
            raise _wrong(f"{field}.data", "it has values that are infinite or not numbers")

    def _is_finite(self) -> bool:
        import numpy as np

        values = self.array()
        if self.dtype == BFLOAT16:
            return bool(((values & BFLOAT16_EXPONENT) != BFLOAT16_EXPONENT).all())
        return bool(np.isfinite(values).all())


class PromptEmbeds(Tensor, frozen=True, kw_only=True):
    """The hidden states of a prompt, one row for each token."""

    def check(self, *, max_rows: int, width: int, field: str = "prompt_embeds") -> None:
        """Raise InvalidRequest for a tensor that a model of this context and width cannot take; 0: it takes none."""
        if width == 0:
            raise _wrong(field, "this model takes no prompt embeds")
        if len(self.shape) != 2:
            raise _wrong(f"{field}.shape", f"it has {len(self.shape)} dimensions; rows and width are 2")
        rows, given_width = self.shape
        if not 0 < rows <= max_rows:
            raise _wrong(f"{field}.shape", f"this model takes 1 to {max_rows} rows")
        if given_width != width:
            raise _wrong(f"{field}.shape", f"this model's rows have {width} values")
        self.check_data(field)

    @classmethod
    def of(cls, rows: ArrayLike) -> PromptEmbeds:
        """Return the prompt embeds of an array of rows, of float32 or float16."""
        import numpy as np

        array = np.asarray(rows)
        values = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        return cls(data=memoryview(values.tobytes()), shape=array.shape, dtype=array.dtype.name)

    def row_digests(self) -> bytes:
        """Return a digest of each row of a tensor that was checked, one after the other."""
        size = self.data.nbytes // self.shape[0]
        kind = self.dtype.encode()
        rows = (self.data[start : start + size] for start in range(0, self.data.nbytes, size))
        return b"".join(hashlib.blake2b(row, digest_size=DIGEST_BYTES, key=kind).digest() for row in rows)


DIGEST_BYTES = 32


def check_total_bytes(tensors: Sequence[PromptEmbeds], field: str = "prompt_embeds") -> None:
    """Raise InvalidRequest for the tensors of one prompt that are too large together."""
    if (num_bytes := sum(embeds.data.nbytes for embeds in tensors)) > MAX_BYTES:
        raise _wrong(field, f"the tensors of a prompt have {num_bytes} bytes together; at most {MAX_BYTES}")


def not_with_embeds(field: str) -> InvalidRequest:
    """Return the error for a field of a request that needs the token ids of the whole prompt."""
    return InvalidRequest(f"{field} cannot go with prompt embeds: their rows have no token ids.", param=field)


class EmbedsSegment(Struct, frozen=True):
    """Rows of prompt embeds that stand in the place of a prompt's tokens."""

    start: int
    """The position of the first row in the prompt."""
    embeds: PromptEmbeds
    digests: bytes
    """A digest of each row: the prefix cache tells rows apart by these."""

    @property
    def stop(self) -> int:
        return self.start + self.embeds.shape[0]

    def digests_within(self, start: int, stop: int) -> bytes:
        """Return the digests of the rows at these positions of the prompt; empty: there are none."""
        first, last = max(start - self.start, 0), max(stop - self.start, 0)
        return self.digests[first * DIGEST_BYTES : last * DIGEST_BYTES]


class InfoEntry(Struct, frozen=True, kw_only=True):
    """An entry has a tensor or values: exactly one of the two."""

    tensor: Tensor | None = None
    values: list[Value] | None = None


PipelineStage = Literal["encode", "denoise", "decode"]


class DeclaredInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input that a stage of an image model takes from clients: a tensor, or a list with a number for each step."""

    stage: PipelineStage
    shape: tuple[int, ...] = ()
    """The shape of the tensor; empty: it is a list."""
    fewer_rows: bool = False
    """True: the tensor may have fewer rows than that, at least one."""
    largest: float = 1.0
    """The first number of the list is at most this, and each is below the one before it."""
    whole_numbers: bool = False
    """True: the numbers are integers, the last at least 0; else the last is above 0."""
    goes_with: str = ""
    """The name of an input without which it cannot be, nor that one without it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return math.prod(self.shape) * 4 if self.shape else 0

    def check(self, entry: InfoEntry, field: str, steps: int) -> None:
        """Raise InvalidRequest for an entry of another form, or another shape, for an image of so many steps."""
        if self.shape:
            if entry.tensor is None:
                raise _wrong(field, "this model takes it as a tensor")
            if entry.tensor.shape != self.shape:
                raise _wrong(f"{field}.tensor.shape", f"this model takes {list(self.shape)}")
            entry.tensor.check_data(f"{field}.tensor")
        elif entry.values is None:
            raise _wrong(field, "this model takes it as a list of values")
        else:
            self._check_values(entry.values, f"{field}.values", steps)

    def _check_values(self, values: list[Value], field: str, steps: int) -> None:
        if len(values) != steps:
            raise _wrong(field, f"it has {len(values)} values; the image has {steps} steps")
        kinds = int if self.whole_numbers else (int, float)
        numbers = [value for value in values if isinstance(value, kinds) and not isinstance(value, bool)]
        is_above = len(numbers) == steps and (numbers[-1] >= 0 if self.whole_numbers else numbers[-1] > 0)
        if not is_above or numbers[0] > self.largest or not all(a > b for a, b in pairwise(numbers)):
            what, least = ("integers", "at least 0") if self.whole_numbers else ("numbers", "above 0")
            raise _wrong(
                field,
                f"this model takes {what}, the first at most {in_full(self.largest)}, each below the one before it, "
                f"the last {least}",
            )


class AdditionalInformation(Struct, frozen=True, kw_only=True):
    """Further inputs for a model, by the names that it knows."""

    entries: dict[str, InfoEntry] = {}

    def check(self, known: Collection[str]) -> None:
        """Raise InvalidRequest for malformed entries, and for names that the model does not know."""
        field = "additional_information.entries"
        check_count(field, "entries", len(self.entries), MAX_ENTRIES)
        for name in self.entries:
            if name not in known:
                possible = f"it knows {', '.join(sorted(known))}" if known else "it knows none"
                raise _wrong(entry_field(name), f"this model knows no such entry; {possible}")
        num_bytes = sum(entry.tensor.data.nbytes for entry in self.entries.values() if entry.tensor is not None)
        if num_bytes > MAX_BYTES:
            raise _wrong(field, f"they have {num_bytes} bytes together; at most {MAX_BYTES}")
        for name, entry in self.entries.items():
            _check_entry(entry, entry_field(name))


PROMPT_EMBEDS = "prompt_embeds"
NEGATIVE_PROMPT_EMBEDS = "negative_prompt_embeds"
"""The entry of additional information that holds the prompt embeds of the negative prompt."""
LATENTS = "latents"
"""The entry that holds the latents to begin with, instead of noise from the seed."""
SIGMAS = "sigmas"
TIMESTEPS = "timesteps"
"""The entries that hold the noise level before each step, as a share or as the scheduler counts it."""


def entry_field(name: str) -> str:
    return f"additional_information.entries[{name[:40]!r}]"


class Conditioning(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prompt embeds that a client sent for an image, and the other inputs of the model's stages."""

    prompt: PromptEmbeds | None = None
    negative: PromptEmbeds | None = None
    information: dict[str, InfoEntry] = {}

    @property
    def num_bytes(self) -> int:
        tensors = self.prompt, self.negative, *(entry.tensor for entry in self.information.values())
        return sum(tensor.data.nbytes for tensor in tensors if tensor is not None)

    def tensor(self, name: str) -> Tensor | None:
        entry = self.information.get(name)
        return None if entry is None else entry.tensor

    def values(self, name: str) -> list[Any] | None:
        entry = self.information.get(name)
        return None if entry is None else entry.values

    def check(self, inputs: Mapping[str, DeclaredInput], *, steps: int) -> None:
        """Raise InvalidRequest, with the field that it came in, for what a model with these inputs cannot take."""
        there = dict.fromkeys(self.information)
        for name, embeds in ((PROMPT_EMBEDS, self.prompt), (NEGATIVE_PROMPT_EMBEDS, self.negative)):
            if embeds is not None:
                there[name] = None
                _check_embeds(embeds, inputs.get(name), _field(name))
        for name, entry in self.information.items():
            if name not in inputs:
                raise _wrong(entry_field(name), "this model knows no such entry")
            inputs[name].check(entry, entry_field(name), steps)
        for name, declared in inputs.items():
            if declared.goes_with and (name in there) != (declared.goes_with in there):
                one, other = (name, declared.goes_with) if name in there else (declared.goes_with, name)
                raise _wrong(_field(one), f"this model needs {other} with it")


NO_CONDITIONING = Conditioning()


def conditioning_of(
    embeds: PromptEmbeds | None, information: AdditionalInformation | None, *, known: Collection[str]
) -> Conditioning:
    """Return what a client sent; `known` are the names that the model knows. Raises InvalidRequest for everything but
    the tensors and lists themselves, which `Conditioning.check` checks."""
    if information is None:
        return Conditioning(prompt=embeds)
    information.check(known)
    others = dict(information.entries)
    entry = others.pop(NEGATIVE_PROMPT_EMBEDS, None)
    if entry is None:
        return Conditioning(prompt=embeds, information=others)
    if entry.tensor is None:
        raise _wrong(entry_field(NEGATIVE_PROMPT_EMBEDS), "this model takes it as a tensor")
    negative = PromptEmbeds(**{name: getattr(entry.tensor, name) for name in Tensor.__struct_fields__})
    return Conditioning(prompt=embeds, negative=negative, information=others)


def check_count(field: str, what: str, count: int, most: int) -> None:
    """Raise InvalidRequest for a field that has too many of something."""
    if count > most:
        raise _wrong(field, f"it has {count} {what}; at most {most}")


def _field(name: str) -> str:
    return name if name == PROMPT_EMBEDS else f"{entry_field(name)}.tensor"


def _check_embeds(embeds: PromptEmbeds, declared: DeclaredInput | None, field: str) -> None:
    max_rows, width = declared.shape if declared is not None else (0, 0)
    embeds.check(max_rows=max_rows, width=width, field=field)
    if declared is not None and not declared.fewer_rows and embeds.shape[0] != max_rows:
        raise _wrong(f"{field}.shape", f"this model takes {max_rows} rows")


def _check_entry(entry: InfoEntry, field: str) -> None:
    check_count(f"{field}.values", "values", len(entry.values or ()), MAX_VALUES)
    if (entry.tensor is None) == (entry.values is None):
        raise _wrong(field, "it must have either a tensor or values")
    for value in entry.values or ():
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(f"{field}.values", "it has a value that is infinite or not a number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _wrong(f"{field}.values", "it has an integer of more than 64 bits")


def _wrong(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}.", param=field)
