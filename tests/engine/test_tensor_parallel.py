"""Ranks give what one process gives: the same tokens for every family, with all that a request may ask for, and also
when a rank dies or hangs in the middle of a stream."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.engine.test_lora import answer
from tests.processes import descendants, is_rank
from tests.tiny_adapters import save_adapter
from tests.tiny_images import SIZE, save_image_model
from tests.tiny_models import SPECS, noisy_copy
from tests.waiting import until
from tests.worker.driving import request
from tests.worker.test_prompt_embeds import embeds
from weft.backends.model_text import open_model_text
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.wire import Vocabulary
from weft.errors import ConfigError
from weft.hub.resolve import resolve
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.specs import JsonSchemaSpec, vocabulary_of
from weft.types import Adapter, Event, FinishReason, ImageParams, MixedPrompt, Pooling, Request

T = TypeVar("T")
PREFIX = [(13 * i + 5) % 300 for i in range(40)]
PROMPTS = [[5, 6, 7], [*PREFIX, 1, 2, 3], [*PREFIX, 9], [(7 * i + 1) % 300 for i in range(70)]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.1, "presence_penalty": 0.2}
FOUR = ("llama-bias", "deepseek-llm")
"""Families that four ranks serve as well: with one head for keys and values, which all have, and with eight.
`tests/model/test_shard.py` cuts each for four."""


@asynccontextmanager
async def serving(model: Path, size: int, **settings: object) -> AsyncIterator[EngineClient]:
    shared = {"max_model_len": 256, "num_blocks": 128, "threads": 1, "image_model": "none", "device": "cpu"}
    shared |= {"heartbeat_timeout_s": 120.0}
    config = load(shared | {"tensor_parallel_size": size, "max_prefill_chunk": 16} | settings, env={})
    files = resolve(str(model))
    if config.model.speculative_model:
        files = replace(files, draft=resolve(config.model.speculative_model))
    client = EngineClient(config, files)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def with_ranks(model: Path, size: int, work: Callable[[EngineClient], Awaitable[T]], **settings: object) -> T:
    async def scenario() -> T:
        async with serving(model, size, **settings) as client:
            result = await work(client)
            assert client.restarts == 0
            return result

    return asyncio.run(scenario())


def requests(run: str, num_tokens: int = 8, **fields: Any) -> list[Request]:
    return [
        replace(request(f"{run} {i} {kind}", prompt, num_tokens, **params), **fields)
        for i, prompt in enumerate(PROMPTS)
        for kind, params in (("greedy", {"logprobs": 2}), ("sampled", SAMPLED))
    ]


async def tokens_of(client: EngineClient, asked: list[Request]) -> list[list[int]]:
    answers = await asyncio.gather(*(answer(client, one) for one in asked))
    assert {last.finish for _, last in answers} == {FinishReason.LENGTH}
    return [tokens for tokens, _ in answers]


async def twice(client: EngineClient) -> list[list[int]]:
    """The second time with a cache that knows the prompts."""
    first = await tokens_of(client, requests("first"))
    assert await tokens_of(client, requests("second")) == first
    assert client.stats().prefix_hits > 0
    return first


@pytest.mark.parametrize("name", SPECS)
def test_every_family_gives_the_same_tokens(name: str, tiny_directory: Callable[[str], Path]) -> None:
    """In chunks of 16 tokens, all at once, with and without a cached prefix."""
    expected = with_ranks(tiny_directory(name), 1, twice)
    for size in (2, 4) if name in FOUR else (2,):
        assert with_ranks(tiny_directory(name), size, twice) == expected, size


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("wide", "Q8_0", {}), ("wide", "Q4_K", {}), ("qwen3", "Q5_1", {"dtype": "float32"}),
        ("llama3", "", {"quantization": "int8"}), ("llama3", "", {"kv_cache_dtype": "int8"}),
        ("llama3", "", {"dtype": "bfloat16"}),
    ],
    ids=str,
)  # fmt: skip
def test_quantised_weights_are_shared_too(
    name: str,
    kind: str,
    settings: dict[str, str],
    tiny_gguf: Callable[[str, str], Path],
    tiny_directory: Callable[[str], Path],
) -> None:
    """A format of each kind; `tests/model/test_shard.py` cuts them all.

    Inputs of quantised weights are rounded to eight bits, and one whose sum differs in its last bit may be rounded
    otherwise: the native step and the reference differ as much on one process (0.05)."""
    model = tiny_gguf(name, kind) if kind else tiny_directory(name)

    async def logprobs(client: EngineClient) -> list[list[float]]:
        asked = [request(f"{i}", prompt, 1, prompt_logprobs=0) for i, prompt in enumerate(PROMPTS)]
        lasts = await asyncio.gather(*(events_of(client, one) for one in asked))
        return [[one.logprob for event in events for one in event.prompt_logprobs or []] for events in lasts]

    expected, found = (with_ranks(model, size, logprobs, **settings) for size in (1, 2))
    tolerance = 0.2 if settings.get("dtype") == "bfloat16" else 0.1
    for one, other in zip(expected, found, strict=True):
        assert len(one) > 1
        np.testing.assert_allclose(other, one, atol=tolerance)


async def events_of(client: EngineClient, asked: Request) -> list[Event]:
    """The events of a request."""
    entry = client.submit(asked)
    arrived = asyncio.Event()
    entry.listener = arrived.set
    events: list[Event] = []
    while not events or events[-1].finish is None:
        await arrived.wait()
        arrived.clear()
        events += [one for one in entry.take() if isinstance(one, Event)]
    return events


def test_log_probabilities_and_vectors_are_the_same(tiny_directory: Callable[[str], Path]) -> None:
    async def work(client: EngineClient) -> list[Any]:
        scored = await events_of(client, request("scored", PROMPTS[1], 4, prompt_logprobs=2, logprobs=2))
        prompt = [one.logprob for event in scored for one in event.prompt_logprobs or []]
        own = [one.logprob for event in scored for one in event.logprobs or []]
        vectors = []
        for pooling in (Pooling.MEAN, Pooling.LAST):
            [*_, last] = await events_of(client, replace(request(str(pooling), PROMPTS[3], 1), pooling=pooling))
            assert last.embedding is not None
            vectors.append(np.frombuffer(last.embedding, np.float32))
        return [np.array(prompt), np.array(own), *vectors]

    expected = with_ranks(tiny_directory("llama3"), 1, work)
    assert [len(one) for one in expected] == [len(PROMPTS[1]) - 1, 4, 64, 64]
    for one, other in zip(expected, with_ranks(tiny_directory("llama3"), 4, work), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5)


def test_adapters_are_loaded_by_all_ranks(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """With more adapters than slots: one takes the place of another, the same on every rank."""
    folders = [save_adapter("llama3", tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    adapters = [Adapter(name=f"style {i}", number=i, path=str(one)) for i, one in enumerate(folders, 1)]

    async def work(client: EngineClient) -> list[list[int]]:
        asked = [one for adapter in (None, *adapters) for one in requests(f"of {adapter}", adapter=adapter)]
        together = await tokens_of(client, asked)
        again = await tokens_of(client, requests("again", adapter=adapters[0]))
        assert again == together[8:16]
        return together

    expected = with_ranks(tiny_directory("llama3"), 1, work, max_loras=2)
    assert len({tuple(one) for one in expected}) > 24, "each has words of its own"
    assert with_ranks(tiny_directory("llama3"), 2, work, max_loras=2) == expected


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafts_change_no_token(kind: str, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_directory("llama3")
    draft = {"speculative_model": str(noisy_copy(model, tmp_path))}
    settings: dict[str, object] = {"speculative": "ngram"} if kind == "ngram" else draft
    asked = [
        request(f"{kind} {i}", [11, 12, 13, 14] * 8, 40, **params)
        for i, params in enumerate(({}, {"seed": 3}, SAMPLED))
    ]

    async def work(client: EngineClient) -> list[list[int]]:
        tokens = await tokens_of(client, asked)
        assert client.stats().draft_tokens > 0
        assert kind == "ngram" or client.stats().accepted_tokens > 0
        return tokens

    expected = with_ranks(model, 1, plain(asked))
    assert with_ranks(model, 2, work, **settings) == expected


def plain(asked: list[Request]) -> Callable[[EngineClient], Awaitable[list[list[int]]]]:
    return lambda client: tokens_of(client, asked)


def test_grammars_are_followed(tiny_directory: Callable[[str], Path]) -> None:
    model = tiny_directory("qwen3")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    async def work(client: EngineClient) -> list[list[int]]:
        text = open_model_text(client.files, client.config.model)
        try:
            vocabulary, compiler = vocabulary_of(text.tokenizer), GrammarCompiler(text.tokenizer)
            client.vocabulary = Vocabulary(vocabulary.tokens, vocabulary.special_ids, vocabulary.eos_token_ids)
            grammar = await compiler.compile(JsonSchemaSpec(schema=schema))
            await compiler.close()
        finally:
            text.close()
        asked = [request(f"g {i}", PROMPTS[0], 30, grammar=grammar, seed=i, temperature=i % 2) for i in range(4)]
        answers = await asyncio.gather(*(answer(client, one) for one in [*asked, *requests("beside")]))
        return [tokens for tokens, _ in answers]

    assert with_ranks(model, 2, work) == with_ranks(model, 1, work)


def test_prompt_embeds_reach_all_ranks(tiny_directory: Callable[[str], Path]) -> None:
    """Also those of more bytes than a slot of the plans' memory has."""
    rows = torch.randn(180, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    prompts = [MixedPrompt.of([PROMPTS[0], embeds(rows[:20]), [4, 5]]), MixedPrompt.of([embeds(rows)])]
    asked = [replace(request(f"e {i}", prompt.token_ids, 12), embeds=prompt.embeds) for i, prompt in enumerate(prompts)]
    expected, found = (
        with_ranks(tiny_directory("llama3"), size, plain(asked), allow_prompt_embeds=True) for size in (1, 2)
    )
    assert found == expected


def test_images_are_generated_beside_the_ranks(tiny_model: Path, tmp_path: Path) -> None:
    """By the first rank, from hidden states that all of them computed."""
    image_model = save_image_model(tmp_path, 96)

    async def work(client: EngineClient) -> bytes | None:
        params = ImageParams(width=SIZE, height=SIZE, steps=3, seed=1, guidance_scale=2.0)
        drawn = replace(request("drawn", [1, 2, 3], 1), image=params)
        events, _ = await asyncio.gather(events_of(client, drawn), tokens_of(client, requests("beside")))
        return events[-1].image

    one, other = (with_ranks(tiny_model, size, work, image_model=str(image_model)) for size in (1, 2))
    assert one is not None and other is not None
    first, second = (np.frombuffer(image, np.uint8).astype(int) for image in (one, other))
    assert np.abs(first - second).max() <= 1


def ranks_of(client: EngineClient) -> list[int]:
    assert client.engine_pid is not None
    return [one for one in descendants(client.engine_pid) if is_rank(one)]


STREAMED = 40
"""The tokens of a stream that is disturbed."""


@pytest.fixture(scope="module")
def undisturbed(tiny_directory: Callable[[str], Path]) -> list[list[int]]:
    """What one process gives."""
    return with_ranks(tiny_directory("llama3"), 1, plain(streamed("undisturbed")))


def streamed(run: str) -> list[Request]:
    """One greedy stream and one that is sampled."""
    return requests(run, STREAMED)[2:4]


@pytest.mark.parametrize(
    ("number", "size", "deaths"), [(signal.SIGKILL, 2, 2), (signal.SIGKILL, 4, 1), (signal.SIGSTOP, 2, 1)]
)
def test_a_rank_that_dies_or_hangs_in_mid_stream_changes_no_byte(
    number: int, size: int, deaths: int, tiny_directory: Callable[[str], Path], undisturbed: list[list[int]]
) -> None:
    """Nothing that the engine had is left, and no request is blamed for what another process did."""

    async def scenario() -> None:
        # On a busy machine a rank may be silent by itself: only where silence is the fault is it short.
        silence_s = 2.0 if number == signal.SIGSTOP else 120.0
        async with serving(tiny_directory("llama3"), size, heartbeat_timeout_s=silence_s) as client:
            for time in range(deaths):
                await until(lambda: client.state == "ready", "an engine")
                first_pid, killed = client.engine_pid, ranks_of(client)
                assert len(killed) == size - 1
                generated, restarts = client.stats().generation_tokens, client.restarts
                streams = asyncio.create_task(tokens_of(client, streamed(f"disturbed {time}")))
                await until(lambda before=generated: client.stats().generation_tokens > before + 10, "tokens")
                os.kill(killed[0], number)
                assert await streams == undisturbed
                await until(lambda before=restarts: client.restarts > before, "another engine")
                gone = [*killed, first_pid]
                await until(lambda pids=gone: not any(Path(f"/proc/{pid}").exists() for pid in pids), "their end")

    asyncio.run(scenario())


def test_ranks_are_replaced_while_nothing_is_computed(
    tiny_directory: Callable[[str], Path], undisturbed: list[list[int]]
) -> None:
    """When one of them dies, and when the engine does; and they end with it, waited for."""

    async def scenario() -> None:
        async with serving(tiny_directory("llama3"), 2) as client:
            for deaths in (1, 2):
                [rank], engine = ranks_of(client), client.engine_pid
                assert engine is not None
                os.kill((rank, engine)[deaths - 1], signal.SIGKILL)
                await until(lambda count=deaths: client.restarts == count and client.state == "ready", "another engine")
                await until(lambda pid=rank: not Path(f"/proc/{pid}").exists(), "the end of the rank")
            assert await tokens_of(client, streamed("afterwards")) == undisturbed
            [closed] = ranks_of(client)
        await until(lambda: not Path(f"/proc/{closed}").exists(), "its end")

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [3, 5])
def test_a_model_that_cannot_be_divided_is_refused(size: int, tiny_directory: Callable[[str], Path]) -> None:
    async def scenario() -> None:
        async with serving(tiny_directory("llama3"), size):
            pass

    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}: the model has 4 heads, 2 key-value") as told:
        asyncio.run(scenario())
    assert told.value.hint == "With this model it can be 1, 2, 4."
