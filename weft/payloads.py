"""Tensors that clients send: prompt embeds, and additional information for a model.

Nothing is copied on the way: decoded from msgpack, the data is a view into the message, and `array` a view into that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from weft.errors import InvalidRequest

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

    def _check_data(self, field: str) -> None:
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
        self._check_data(field)

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


NEGATIVE_PROMPT_EMBEDS = "negative_prompt_embeds"
"""The entry of additional information that holds the prompt embeds of the negative prompt."""


def entry_field(name: str) -> str:
    return f"additional_information.entries[{name[:40]!r}]"


class GivenTexts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prompt embeds that a client sent for an image."""

    prompt: PromptEmbeds | None = None
    negative: PromptEmbeds | None = None

    @property
    def num_bytes(self) -> int:
        return sum(embeds.data.nbytes for embeds in (self.prompt, self.negative) if embeds is not None)

    def check(self, *, max_rows: int, width: int) -> None:
        """Raise InvalidRequest, with the field that it came in, for a tensor that the model cannot take."""
        if self.prompt is not None:
            self.prompt.check(max_rows=max_rows, width=width)
        if self.negative is not None:
            field = f"{entry_field(NEGATIVE_PROMPT_EMBEDS)}.tensor"
            self.negative.check(max_rows=max_rows, width=width, field=field)


NO_TEXTS = GivenTexts()


def given_texts(
    embeds: PromptEmbeds | None, information: AdditionalInformation | None, *, known: Collection[str]
) -> GivenTexts:
    """Return the prompt embeds among what a client sent; `known` are the names that the model knows. Raises
    InvalidRequest for everything but the tensors themselves, which `GivenTexts.check` checks."""
    if information is None:
        return GivenTexts(prompt=embeds)
    information.check(known)
    entry = information.entries.get(NEGATIVE_PROMPT_EMBEDS)
    if entry is None:
        return GivenTexts(prompt=embeds)
    if entry.tensor is None:
        raise _wrong(entry_field(NEGATIVE_PROMPT_EMBEDS), "it must have a tensor")
    negative = PromptEmbeds(**{name: getattr(entry.tensor, name) for name in Tensor.__struct_fields__})
    return GivenTexts(prompt=embeds, negative=negative)


def check_count(field: str, what: str, count: int, most: int) -> None:
    """Raise InvalidRequest for a field that has too many of something."""
    if count > most:
        raise _wrong(field, f"it has {count} {what}; at most {most}")


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
