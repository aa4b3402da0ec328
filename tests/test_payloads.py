"""Tensors from clients: every rule has a refusal that names the field, and nothing is copied on the way."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import payloads
from weft.errors import InvalidRequest
from weft.payloads import AdditionalInformation, InfoEntry, PromptEmbeds, Tensor

WIDTH, MAX_ROWS = 4, 6


def bfloat16(*values: float) -> bytes:
    return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def embeds(**fields: Any) -> PromptEmbeds:
    given = {"data": np.arange(8, dtype="<f4").tobytes(), "shape": (2, WIDTH), "dtype": "float32", **fields}
    return PromptEmbeds(**given | {"data": memoryview(given["data"])})


def check(given: PromptEmbeds) -> None:
    given.check(max_rows=MAX_ROWS, width=WIDTH)


def refusal(check: Any, *arguments: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        check(*arguments)
    assert refused.value.status == 400
    assert str(refused.value).startswith(f"{refused.value.param}: ")
    return refused.value


DATA = np.arange(8, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sha256": hashlib.sha256(DATA).hexdigest()},
        {"sha256": hashlib.sha256(DATA).hexdigest().upper()},
        {"data": np.zeros((MAX_ROWS, WIDTH), "<f2").tobytes(), "shape": (MAX_ROWS, WIDTH), "dtype": "float16"},
        {"data": bfloat16(1, -2, 3e38, -1e-38), "shape": (1, WIDTH), "dtype": "bfloat16"},
        {"data": np.full(4, 65504, "<f2").tobytes(), "shape": (1, WIDTH), "dtype": "float16"},
    ],
)
def test_what_is_right_passes(fields: dict[str, Any]) -> None:
    check(embeds(**fields))


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"shape": (8,)}, "shape", "1 dimensions"),
        ({"shape": ()}, "shape", "0 dimensions"),
        ({"shape": (1, 2, WIDTH)}, "shape", "3 dimensions"),
        ({"data": b"", "shape": (0, WIDTH)}, "shape", "from 1 to"),
        ({"shape": (-2, WIDTH)}, "shape", "from 1 to"),
        ({"shape": (-2, -WIDTH)}, "shape", "from 1 to"),
        ({"shape": (10**4000, 10**4000)}, "shape", "from 1 to"),
        ({"data": bytes(7 * WIDTH * 4), "shape": (7, WIDTH)}, "shape", "takes 1 to 6"),
        ({"shape": (WIDTH, 2)}, "shape", "have 2 values; this model's have 4"),
        ({"dtype": "float64"}, "dtype", "float32, float16, bfloat16"),
        ({"dtype": "object"}, "dtype", "float32, float16, bfloat16"),
        ({"dtype": ""}, "dtype", "float32, float16, bfloat16"),
        ({"data": DATA[:-1]}, "data", "has 31 bytes; its shape and dtype ask for 32"),
        ({"data": DATA + b"\0"}, "data", "has 33 bytes"),
        ({"dtype": "float16"}, "data", "ask for 16"),
        ({"data": np.array([1, 2, 3, np.nan], "<f4").tobytes(), "shape": (1, 4)}, "data", "infinite"),
        ({"data": np.array([1, 2, 3, np.inf], "<f4").tobytes(), "shape": (1, 4)}, "data", "infinite"),
        (
            {"data": np.array([1, 2, -np.inf, 4], "<f2").tobytes(), "shape": (1, 4), "dtype": "float16"},
            "data",
            "infinite",
        ),
        ({"data": bfloat16(1, 2, 3, np.nan), "shape": (1, 4), "dtype": "bfloat16"}, "data", "infinite"),
        ({"data": bfloat16(-np.inf, 2, 3, 4), "shape": (1, 4), "dtype": "bfloat16"}, "data", "infinite"),
        ({"sha256": "0" * 64}, "sha256", "not that of the data"),
        ({"sha256": "nonsense"}, "sha256", "not that of the data"),
    ],
)
def test_every_violation_names_its_field(fields: dict[str, Any], field: str, said: str) -> None:
    error = refusal(check, embeds(**fields))
    assert error.param == f"prompt_embeds.{field}"
    assert said in str(error)


def test_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert payloads.MAX_BYTES == 100_000_000
    monkeypatch.setattr(payloads, "MAX_BYTES", 31)
    assert refusal(check, embeds()).param == "prompt_embeds.data"
    tensor = Tensor(data=memoryview(bytes(16)), shape=(4,), dtype="float32")
    AdditionalInformation(entries={"a": InfoEntry(tensor=tensor)}).check()
    both = AdditionalInformation(entries={name: InfoEntry(tensor=tensor) for name in "ab"})
    assert "32 bytes together" in str(refusal(both.check))


def test_a_width_that_is_not_known_is_not_checked() -> None:
    embeds(shape=(4, 2)).check(max_rows=MAX_ROWS, width=None)


TENSOR = Tensor(data=memoryview(bytes(24)), shape=(2, 1, 3), dtype="float32")


def test_information_that_is_right_passes() -> None:
    entries = {"tensor": InfoEntry(tensor=TENSOR), "list": InfoEntry(values=[1, 2.5, "a", True, -(2**63)])}
    AdditionalInformation(entries=entries | {"empty": InfoEntry(values=[])}).check()
    AdditionalInformation(entries={str(number): InfoEntry(values=[]) for number in range(100)}).check()
    AdditionalInformation().check()


@pytest.mark.parametrize(
    ("entry", "place", "said"),
    [
        (InfoEntry(), "", "either"),
        (InfoEntry(tensor=TENSOR, values=[]), "", "either"),
        (InfoEntry(values=[1.0, float("nan")]), ".values", "infinite"),
        (InfoEntry(values=[2**63]), ".values", "64 bits"),
        (InfoEntry(tensor=Tensor(data=memoryview(b""), shape=(), dtype="float32")), ".tensor.shape", "1 to 8"),
        (InfoEntry(tensor=Tensor(data=memoryview(b""), shape=(1,) * 9, dtype="float32")), ".tensor.shape", "1 to 8"),
        (InfoEntry(tensor=Tensor(data=memoryview(b"12"), shape=(1,), dtype="float32")), ".tensor.data", "ask for 4"),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry: InfoEntry, place: str, said: str) -> None:
    information = AdditionalInformation(entries={"good": InfoEntry(values=[1]), "x": entry})
    error = refusal(information.check)
    assert error.param == f"additional_information.entries['x']{place}"
    assert said in str(error)


def test_too_many_entries() -> None:
    information = AdditionalInformation(entries={str(number): InfoEntry(values=[]) for number in range(101)})
    assert refusal(information.check).param == "additional_information.entries"


@pytest.mark.parametrize("dtype", payloads.STORED_AS)
def test_a_round_trip_copies_nothing(dtype: str) -> None:
    raw = np.arange(2 * WIDTH, dtype=payloads.STORED_AS[dtype])
    message = msgspec.msgpack.encode(embeds(data=raw.tobytes(), dtype=dtype))
    received = msgspec.msgpack.decode(message, type=PromptEmbeds)
    check(received)
    assert np.shares_memory(received.array(), np.frombuffer(message, np.uint8))
    assert received.array().shape == (2, WIDTH)
    assert received.array().tobytes() == raw.tobytes()


@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(-9, 9) | st.text() | st.booleans())))
def test_information_comes_back_as_it_was(lists: dict[str, list[Any]]) -> None:
    information = AdditionalInformation(
        entries={name: InfoEntry(values=values) for name, values in lists.items()} | {"": InfoEntry(tensor=TENSOR)}
    )
    for codec in (msgspec.msgpack, msgspec.json):
        received = codec.decode(codec.encode(information), type=AdditionalInformation)
        assert {name: entry.values for name, entry in received.entries.items()} == lists | {"": None}
        tensor = received.entries[""].tensor
        assert tensor is not None and (bytes(tensor.data), tensor.shape) == (bytes(24), (2, 1, 3))
