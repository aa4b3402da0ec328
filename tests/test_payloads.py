"""Tensors from clients: every rule has an error that names the field, and nothing is copied."""

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
from weft.payloads import (
    AdditionalInformation,
    Conditioning,
    DeclaredInput,
    InfoEntry,
    PromptEmbeds,
    Tensor,
    conditioning_of,
)

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
        ({"data": b"", "shape": (0, WIDTH)}, "shape", "takes 1 to 6 rows"),
        ({"shape": (-2, WIDTH)}, "shape", "takes 1 to 6 rows"),
        ({"shape": (-2, -WIDTH)}, "shape", "takes 1 to 6 rows"),
        ({"shape": (10**5000, WIDTH)}, "shape", "takes 1 to 6 rows"),
        ({"shape": (1, 10**5000)}, "shape", "rows have 4 values"),
        ({"data": bytes(7 * WIDTH * 4), "shape": (7, WIDTH)}, "shape", "takes 1 to 6 rows"),
        ({"shape": (WIDTH, 2)}, "shape", "rows have 4 values"),
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
        ({"sha256": "0" * 64}, "sha256", "does not match the data"),
        ({"sha256": "nonsense"}, "sha256", "does not match the data"),
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
    AdditionalInformation(entries={"a": InfoEntry(tensor=tensor)}).check("ab")
    both = AdditionalInformation(entries={name: InfoEntry(tensor=tensor) for name in "ab"})
    assert "32 bytes together" in str(refusal(both.check, "ab"))


def test_a_model_that_draws_from_no_states_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="takes no prompt embeds"):
        embeds().check(max_rows=MAX_ROWS, width=0)


TENSOR = Tensor(data=memoryview(bytes(32)), shape=(2, WIDTH), dtype="float32")


def test_information_that_is_right_passes() -> None:
    entries = {"tensor": InfoEntry(tensor=TENSOR), "list": InfoEntry(values=[1, 2.5, "a", True, -(2**63)])}
    entries["empty"] = InfoEntry(values=[])
    AdditionalInformation(entries=entries).check(entries)
    many = {str(number): InfoEntry(values=[]) for number in range(100)}
    AdditionalInformation(entries=many).check(many)
    AdditionalInformation().check([])


@pytest.mark.parametrize(
    ("entry", "place", "said"),
    [
        (InfoEntry(), "", "either"),
        (InfoEntry(tensor=TENSOR, values=[]), "", "either"),
        (InfoEntry(values=[1.0, float("nan")]), ".values", "infinite"),
        (InfoEntry(values=[2**63]), ".values", "64 bits"),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry: InfoEntry, place: str, said: str) -> None:
    information = AdditionalInformation(entries={"good": InfoEntry(values=[1]), "x": entry})
    error = refusal(information.check, ["good", "x"])
    assert error.param == f"additional_information.entries['x']{place}"
    assert said in str(error)


def test_too_many_entries() -> None:
    information = AdditionalInformation(entries={str(number): InfoEntry(values=[]) for number in range(101)})
    assert refusal(information.check, information.entries).param == "additional_information.entries"


@pytest.mark.parametrize(("known", "said"), [(["b", "a"], "it knows a, b"), ([], "it knows none")])
def test_an_entry_that_the_model_does_not_know_is_named_with_those_it_knows(known: list[str], said: str) -> None:
    error = refusal(AdditionalInformation(entries={"x": InfoEntry(values=[1])}).check, known)
    assert error.param == "additional_information.entries['x']" and said in str(error)


# Conditioning of images.

NEGATIVE = "additional_information.entries['negative_prompt_embeds']"
EMBEDS = DeclaredInput(stage="encode", shape=(MAX_ROWS, WIDTH), fewer_rows=True)
INPUTS = {"prompt_embeds": EMBEDS, "negative_prompt_embeds": EMBEDS}


def information(**entries: InfoEntry) -> AdditionalInformation:
    return AdditionalInformation(entries=entries)


def test_a_negative_prompt_comes_as_information() -> None:
    known = ["negative_prompt_embeds"]
    assert conditioning_of(None, None, known=[]) == conditioning_of(None, information(), known=known) == Conditioning()
    assert conditioning_of(embeds(), None, known=[]).prompt == embeds()
    both = conditioning_of(embeds(), information(negative_prompt_embeds=InfoEntry(tensor=TENSOR)), known=known)
    assert both.negative == embeds(data=bytes(32)) and both.num_bytes == 64
    both.check(INPUTS, steps=1)
    values = information(negative_prompt_embeds=InfoEntry(values=[1.0]))
    with pytest.raises(InvalidRequest) as refused:
        conditioning_of(None, values, known=known)
    assert refused.value.param == NEGATIVE


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"shape": (32,)}, "shape"), ({"dtype": "int8"}, "dtype"), ({"data": b""}, "data"), ({"sha256": "0"}, "sha256")],
)
def test_its_rules_are_those_of_a_prompt(wrong: dict[str, Any], field: str) -> None:
    for texts, place in (
        (Conditioning(prompt=embeds(**wrong)), "prompt_embeds"),
        (Conditioning(prompt=embeds(), negative=embeds(**wrong)), f"{NEGATIVE}.tensor"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            texts.check(INPUTS, steps=1)
        assert refused.value.param == f"{place}.{field}"


LATENTS, SIGMAS = "latents", "sigmas"
DECLARED = INPUTS | {
    LATENTS: DeclaredInput(stage="denoise", shape=(2, WIDTH)),
    SIGMAS: DeclaredInput(stage="denoise"),
    "timesteps": DeclaredInput(stage="denoise", largest=999, whole_numbers=True),
    "pooled": DeclaredInput(stage="encode", shape=(8,), goes_with="prompt_embeds"),
}


def values(*given: Any) -> InfoEntry:
    return InfoEntry(values=list(given))


def test_inputs_in_both_forms_pass_in_the_form_that_a_stage_declares() -> None:
    pooled = InfoEntry(tensor=Tensor(data=memoryview(bytes(32)), shape=(8,), dtype="float32"))
    entries = {LATENTS: InfoEntry(tensor=TENSOR), SIGMAS: values(1, 0.5, 0.25), "timesteps": values(999, 1, 0)}
    given = conditioning_of(embeds(), information(**entries, pooled=pooled), known=DECLARED)
    given.check(DECLARED, steps=3)
    assert given.tensor(LATENTS) == TENSOR and given.values(SIGMAS) == [1, 0.5, 0.25]
    assert given.tensor(SIGMAS) is given.values("none") is None
    assert given.num_bytes == 3 * 32


@pytest.mark.parametrize(
    ("name", "entry", "place", "said"),
    [
        (LATENTS, values(1, 2), "", "takes it as a tensor"),
        (SIGMAS, InfoEntry(tensor=TENSOR), "", "takes it as a list of values"),
        (LATENTS, InfoEntry(tensor=embeds(shape=(WIDTH, 2))), ".tensor.shape", "takes [2, 4]"),
        (LATENTS, InfoEntry(tensor=embeds(shape=(10**5000, 2))), ".tensor.shape", "takes [2, 4]"),
        (LATENTS, InfoEntry(tensor=embeds(dtype="int8")), ".tensor.dtype", "float32, float16"),
        (LATENTS, InfoEntry(tensor=embeds(data=DATA[:-1])), ".tensor.data", "has 31 bytes"),
        (SIGMAS, values(1, 0.5), ".values", "2 values; the image has 3 steps"),
        (SIGMAS, values(), ".values", "0 values"),
        (SIGMAS, values(1, 0.5, 0.5), ".values", "each below the one before it"),
        (SIGMAS, values(0.1, 0.5, 0.4), ".values", "each below the one before it"),
        (SIGMAS, values(1.5, 0.5, 0.4), ".values", "at most 1"),
        (SIGMAS, values(1, 0.5, 0), ".values", "above 0"),
        (SIGMAS, values(1, float("nan"), 0.1), ".values", "numbers"),
        (SIGMAS, values(True, 0.5, 0.1), ".values", "numbers"),
        (SIGMAS, values("1", 0.5, 0.1), ".values", "numbers"),
        ("timesteps", values(9.5, 5, 1), ".values", "integers"),
        ("timesteps", values(1000, 5, 1), ".values", "at most 999"),
        ("timesteps", values(9, 5, -1), ".values", "at least 0"),
        ("other", values(1), "", "knows no such entry"),
        ("pooled", InfoEntry(tensor=embeds(shape=(8,))), ".tensor", "needs prompt_embeds with it"),
    ],
)
def test_an_input_that_a_stage_cannot_take_is_named(name: str, entry: InfoEntry, place: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Conditioning(information={name: entry}).check(DECLARED, steps=3)
    assert refused.value.param == f"additional_information.entries['{name}']{place}" and said in str(refused.value)
    assert len(str(refused.value)) < 250


def test_a_tensor_that_goes_with_another_is_missed() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_embeds: this model needs pooled with it"):
        Conditioning(prompt=embeds()).check(DECLARED, steps=3)


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
        assert tensor is not None and (bytes(tensor.data), tensor.shape) == (bytes(32), (2, WIDTH))
