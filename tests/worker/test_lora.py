"""Rows with LoRA adapters: the logits of a model with the adapter in its weights, in any company, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.scheduler.simulation import events_of
from tests.tiny_adapters import lora_tensors, save_adapter, save_merged
from tests.tiny_models import SPECS, VOCAB_SIZE
from tests.waiting import PATIENCE
from tests.worker.driving import Driven, load, request, run, under_reference, watched_logits
from tests.worker.subjects import AFTER_THE_FIRST
from weft.engine.core import EngineCore
from weft.errors import InvalidRequest
from weft.plan import Row
from weft.scheduler.scheduler import Scheduler
from weft.types import Adapter, FinishReason, Pooling, Request
from weft.worker.inputs import exact_shape, lay_out, views
from weft.worker.lora_rows import LoraRows

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(31 * i + 2) % VOCAB_SIZE for i in range(37)]
NUM_TOKENS = 12
SCALE = 2.0
"""lora_alpha over r, as `save_adapter` writes them."""


def with_adapter(made: Request, adapter: Adapter | None) -> Request:
    return replace(made, adapter=adapter)


def logits_of(driven: Driven, made: Request) -> tuple[Tensor, list[int]]:
    """Of every step of a request that runs alone."""
    with watched_logits() as seen:
        tokens = run(driven, [made]).tokens(made.request_id)
    return torch.cat(seen), tokens


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Adapter]:
    made: dict[tuple[str, int], Adapter] = {}

    def adapter(name: str, number: int = 1) -> Adapter:
        if (name, number) not in made:
            folder = save_adapter(name, tmp_path_factory.mktemp("adapter"), seed=number)
            made[name, number] = Adapter(name=f"style {number}", number=number, path=str(folder))
        return made[name, number]

    return adapter


@pytest.mark.parametrize("name", SPECS)
def test_the_logits_are_those_of_the_merged_weights(
    name: str, adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    merged = load(save_merged(name, tmp_path, lora_tensors(name, 1), SCALE))
    expected, tokens = logits_of(merged, request("r", PROMPT, NUM_TOKENS))
    driven = load(tiny_directory(name))
    for how in (driven, under_reference(driven)):
        found, written = logits_of(how, with_adapter(request("r", PROMPT, NUM_TOKENS), adapters(name)))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert written == tokens
    plain, _ = logits_of(driven, request("r", PROMPT, 1))
    assert (plain - expected[:1]).abs().max() > 0.1, "an adapter that changes nothing proves nothing"


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.in_gguf])
def test_a_gguf_model_takes_the_same_adapter(
    name: str, adapters: Callable[..., Adapter], tiny_gguf: Callable[[str, str], Path], tmp_path: Path
) -> None:
    merged = load(save_merged(name, tmp_path, lora_tensors(name, 1), SCALE))
    expected, _ = logits_of(merged, request("r", PROMPT, NUM_TOKENS))
    found, _ = logits_of(load(tiny_gguf(name, "F32")), with_adapter(request("r", PROMPT, NUM_TOKENS), adapters(name)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def mixed(adapters: Callable[..., Adapter], name: str = "llama3") -> list[Request]:
    """Two of each of two adapters and two without, of prompts of their own, with the log probabilities of their
    answers."""
    return [
        with_adapter(
            request(
                f"{number} {i}",
                [(7 * j + i + number) % VOCAB_SIZE for j in range(5 + 40 * i)],
                NUM_TOKENS,
                temperature=0.7 * i,
                seed=number,
                logprobs=5,
            ),
            adapters(name, number) if number else None,
        )
        for i in range(2)
        for number in (0, 1, 2)
    ]


COMPANIES: dict[str, dict[str, object]] = {
    "together": {},
    "in chunks": {"max_prefill_chunk": 7},
    "preempted": {"force_preempt_every": 3},
    "a step ahead": {"overlap": True},
    "one after the other": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("company", COMPANIES)
def test_every_row_has_the_bits_that_it_has_alone(
    company: str, adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    """In native code. Log probabilities of two runs are equal only where the logits are."""
    driven = load(tiny_directory("llama3"))
    made = mixed(adapters)
    together = run(driven, made, **COMPANIES[company]).outputs
    for one in made:
        alone = run(driven, [one]).outputs[one.request_id]
        assert together[one.request_id].token_ids == alone.token_ids
        assert together[one.request_id].logprobs == alone.logprobs


def test_without_native_code_the_tokens_are_the_same_in_company(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    """torch chooses other kernels for other numbers of rows: as without adapters, the last bits may differ."""
    driven = under_reference(load(tiny_directory("llama3")))
    made = mixed(adapters)
    together = run(driven, made).outputs
    for one in made:
        alone = run(driven, [one]).outputs[one.request_id]
        assert together[one.request_id].token_ids == alone.token_ids
        ours, theirs = ([logprob.logprob for logprob in of.logprobs] for of in (together[one.request_id], alone))
        assert ours == pytest.approx(theirs, abs=3e-5)


def test_an_adapter_for_some_projections_leaves_the_others_as_they_are(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """As most adapters are: queries and values, of another rank."""
    parts = ("q_proj", "v_proj", "down_proj")
    folder = save_adapter("qwen3", tmp_path / "adapter", parts=parts, rank=3)
    merged = load(save_merged("qwen3", tmp_path / "merged", lora_tensors("qwen3", 1, rank=3, parts=parts), 8 / 3))
    expected, _ = logits_of(merged, request("r", PROMPT, NUM_TOKENS))
    driven = load(tiny_directory("qwen3"))
    made = with_adapter(request("r", PROMPT, NUM_TOKENS), Adapter(name="some", number=1, path=str(folder)))
    for how in (driven, under_reference(driven)):
        torch.testing.assert_close(logits_of(how, made)[0], expected, atol=1e-4, rtol=0)


def test_cached_prompts_are_an_adapters_own(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    driven = load(tiny_directory("llama3"))
    prompts = {
        "first": adapters("llama3", 1),
        "same": adapters("llama3", 1),
        "other": adapters("llama3", 2),
        "none": None,
        "reloaded": replace(adapters("llama3", 1), number=3),
    }
    made = [with_adapter(request(name, PROMPT, 2), adapter) for name, adapter in prompts.items()]
    later = [(AFTER_THE_FIRST + i, one) for i, one in enumerate(made[1:])]
    outputs = run(driven, made[:1], later=later).outputs
    assert {name: output.cached_tokens for name, output in outputs.items()} == {
        "first": 0, "same": 32, "other": 0, "none": 0, "reloaded": 0
    }  # fmt: skip
    assert outputs["same"].token_ids == outputs["first"].token_ids == outputs["reloaded"].token_ids


def test_siblings_share_a_prompt_with_their_adapter(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    driven = load(tiny_directory("llama3"))
    leader = with_adapter(request("leader", PROMPT, NUM_TOKENS), adapters("llama3"))
    sibling = replace(leader, request_id="sibling", sibling_of="leader")
    outputs = run(driven, [leader, sibling]).outputs
    assert outputs["sibling"].cached_tokens == 32
    assert outputs["sibling"].token_ids == outputs["leader"].token_ids
    scheduler = Scheduler(driven.limits)
    scheduler.add(leader)
    with pytest.raises(InvalidRequest, match="adapter differ"):
        scheduler.add(replace(sibling, adapter=None))


def test_hidden_states_and_prompt_logprobs_are_the_adapters_too(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    merged = load(save_merged("llama3", tmp_path, lora_tensors("llama3", 1), SCALE))
    driven = load(tiny_directory("llama3"))
    vector = replace(request("vector", PROMPT, 1), pooling=Pooling.MEAN)
    scored = request("scored", PROMPT, 1, prompt_logprobs=1)
    for how in (driven, under_reference(driven)):
        outputs = run(how, [with_adapter(one, adapters("llama3")) for one in (vector, scored)]).outputs
        expected = run(merged, [vector, scored]).outputs
        found, wanted = (torch.frombuffer(bytearray(of["vector"].embedding), dtype=torch.float32)
                         for of in (outputs, expected))  # fmt: skip
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        of_ours, of_theirs = ([one.logprob for one in of["scored"].prompt_logprobs] for of in (outputs, expected))
        assert of_ours == pytest.approx(of_theirs, abs=1e-4)


def test_more_adapters_than_places_wait_for_one(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    driven = load(tiny_directory("llama3"))
    made = [with_adapter(request(f"{n} {i}", PROMPT, 6), adapters("llama3", n)) for i in range(2) for n in (1, 2, 3)]
    alone = {one.request_id: run(driven, [one]).tokens(one.request_id) for one in made}
    driven.runner.adapters = LoraRows(driven.runner.stepper, max_adapters=2)
    outcome = run(driven, made)
    assert {name: output.token_ids for name, output in outcome.outputs.items()} == alone
    assert len(driven.runner.adapters.numbers) == 2


def test_the_adapter_that_was_not_asked_for_for_longest_makes_room(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    kept = LoraRows(load(tiny_directory("llama3")).runner.stepper, max_adapters=2)
    one, two, three = (adapters("llama3", n) for n in (1, 2, 3))
    weights = {of.number: kept.read(of).result(PATIENCE) for of in (one, two, three)}
    assert kept.place(one, weights[1], set()) and kept.place(two, weights[2], {1})
    assert kept.read(one).result(0) is weights[1], "it is not read again"
    assert not kept.place(three, weights[3], {1, 2})
    assert kept.place(one, weights[1], {1, 2})
    assert kept.place(three, weights[3], set()) and kept.numbers == [1, 3]


def test_a_request_with_a_broken_adapter_ends_alone(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """And one that comes when the files are whole is served."""
    driven = load(tiny_directory("llama3"))
    core = EngineCore(Scheduler(driven.limits), driven.runner)
    broken = Adapter(name="broken", number=9, path=str(tmp_path / "broken"))

    def ends(*requests: Request) -> dict[str, tuple[FinishReason | None, str]]:
        found = {}
        assert core.submit(requests) == []
        while core.has_work:
            found |= {event.request_id: (event.finish, event.error) for event in events_of(core.step()) if event.finish}
        core.settle()
        return found

    good = with_adapter(request("good", PROMPT, 5), adapters("llama3"))
    bad = with_adapter(request("bad", PROMPT, 5), broken)
    found = ends(good, bad, request("plain", PROMPT, 5))
    assert found["good"] == found["plain"] == (FinishReason.LENGTH, "")
    reason, error = found["bad"]
    assert reason is FinishReason.REJECTED and str(tmp_path / "broken" / "adapter_config.json") in error
    save_adapter("llama3", tmp_path / "broken")
    assert ends(bad) == {"bad": (FinishReason.LENGTH, "")}


def test_a_request_that_is_aborted_while_its_adapter_is_read_is_gone(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path]
) -> None:
    driven = load(tiny_directory("llama3"))
    core = EngineCore(Scheduler(driven.limits), driven.runner)
    core.submit([with_adapter(request("r", PROMPT, 5), adapters("llama3"))])
    core.abort(["r"])
    assert not core.has_work and not core.step()


def test_an_adapter_of_a_larger_rank_than_the_slots_have_is_taken(
    adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without native code, adapters are in slots. Those that were there stay what they are."""
    driven = load(tiny_directory("llama3"))
    large = Adapter(name="large", number=3, path=str(save_adapter("llama3", tmp_path / "large", 3, rank=20)))
    made = [*mixed(adapters)[:3], with_adapter(request("large", PROMPT, NUM_TOKENS), large)]
    expected = run(driven, made).outputs
    in_slots = under_reference(driven)
    run(in_slots, made[:3])
    kept = in_slots.runner.adapters
    assert kept.slots is not None and kept.slots.rank == 16
    found = run(in_slots, made).outputs
    assert kept.slots.rank == 32
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


@pytest.mark.parametrize("spare", [0, 5])
def test_tokens_are_grouped_by_the_slots_of_their_adapters(spare: int) -> None:
    """Those without an adapter come first, and so do the tokens to spare of a captured step's shape."""
    rows = [Row(0, 0, 3, [], True), Row(1, 9, 1, [], True), Row(2, 4, 1, [], True), Row(3, 7, 2, [], False)]
    slots = {0: 2, 1: 0, 3: 2}
    exact = exact_shape(rows)
    shape = exact._replace(decodes=exact.decodes + spare, slots=4)
    layout = lay_out(rows, shape, padding_row=9, slot_of=lambda row: slots.get(row, -1))
    inputs = views(torch.from_numpy(layout.packed), shape)
    starts = inputs.slot_starts.tolist()
    rows_of_groups = [inputs.token_rows[inputs.slot_order[i:j]].tolist() for i, j in pairwise(starts)]
    assert [sorted(found) for found in rows_of_groups] == [[2, *[9] * spare], [1], [], [0, 0, 0, 3, 3], []]
    assert sorted(inputs.slot_order.tolist()) == list(range(shape.num_tokens))


def test_a_step_without_adapters_has_no_groups() -> None:
    rows = [Row(0, 0, 3, [], True)]
    layout = lay_out(rows, exact_shape(rows), padding_row=9)
    inputs = views(torch.from_numpy(layout.packed), layout.shape)
    assert not len(inputs.slot_order) and not len(inputs.slot_starts)
