"""Every kind of server: what it is asked for, and how its answers are read. The exchanges of vLLM and llama.cpp were
recorded from them, but for a chat of llama.cpp; those of TensorRT-LLM and MindIE were written from their sources."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from tests.backends.openai_server.peer import Asked, Reply, ScriptedPeer, all_of, connected
from tests.generation import sample
from weft.backends.contract import FIELD_RULES, Abilities, ParsedOutput, check_abilities
from weft.backends.openai_server.requests import PeerRequestWriter
from weft.backends.openai_server.servers import KINDS, OTHER, ServerKind, abilities_of, kind_of
from weft.backends.vllm.vllm_engine import ABILITIES as VLLM_ABILITIES
from weft.errors import InvalidRequest
from weft.payloads import PromptEmbeds
from weft.text.grammars.specs import (
    ChoiceSpec,
    JsonObjectSpec,
    JsonSchemaSpec,
    LarkSpec,
    OutputSpec,
    RegexSpec,
    encode_spec,
)
from weft.text.parsers.pieces import ParsedAnswer, collect
from weft.types import Conversation, FinishReason, MixedPrompt, Output, SamplingParams

EXCHANGES = Path(__file__).parent / "exchanges"
RECORDED = ("recorded/vllm", "recorded/llama_cpp")
WRITTEN = ("written/tensorrt", "written/mindie")
WRITTEN_CHATS = ("written/llama_cpp", *WRITTEN)
TELL_IDS = ("recorded/vllm", "written/tensorrt")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CHAT = Conversation(messages=[{"role": "user", "content": "Is it cold in Oslo?"}], tools=[WEATHER])
PARAMS = SamplingParams(max_tokens=16, temperature=0.5, top_p=0.9)


def exchanged(folder: str, name: str) -> bytes:
    """What a server says; a file that is not in the folder is in that of the same server's recordings."""
    file = EXCHANGES / folder / name
    return (file if file.exists() else EXCHANGES / "recorded" / file.parent.name / name).read_bytes()


async def peer_of(folder: str) -> ScriptedPeer:
    peer = ScriptedPeer()

    async def models(reply: Reply, asked: Asked) -> None:
        await reply.head(200, "application/json")
        await reply.write(exchanged(folder, "models.json"))

    def streams(name: str) -> Any:
        async def stream(reply: Reply, asked: Asked) -> None:
            await reply.head()
            await reply.write(exchanged(folder, name))

        return stream

    peer.answers |= {
        "/v1/models": models,
        "/v1/completions": streams("completions.sse"),
        "/v1/chat/completions": streams("chat.sse"),
    }
    return peer


def played(folder: str, prompt: Any, **settings: Any) -> tuple[list[Output], Asked]:
    async def go() -> tuple[list[Output], Asked]:
        async with await peer_of(folder) as peer, connected(peer, **settings) as engine:
            return await all_of(engine, prompt, PARAMS), peer.generations()[0]

    return asyncio.run(go())


@pytest.mark.parametrize("folder", RECORDED)
def test_a_recorded_completion(folder: str, tiny_model: Path) -> None:
    check_completion(folder, tiny_model)


@pytest.mark.parametrize("folder", WRITTEN)
def test_a_written_completion(folder: str, tiny_model: Path) -> None:
    check_completion(folder, tiny_model)


def check_completion(folder: str, tiny_model: Path) -> None:
    deltas, asked = played(folder, [5, 6], tokenizer=str(tiny_model), max_model_len=512)
    assert asked.body["prompt"] == [5, 6]
    last = deltas[-1]
    assert last.finish is FinishReason.LENGTH
    assert last.usage.prompt_tokens == 2
    assert last.usage.completion_tokens == 4
    ids = [token for delta in deltas for token in delta.token_ids]
    if folder in TELL_IDS:
        assert len(ids) == 4
    else:
        text = {"recorded/llama_cpp": "ennn", "written/mindie": "The sea is wide"}[folder]
        assert (ids, "".join(delta.text for delta in deltas)) == ([], text)


def test_a_recorded_chat() -> None:
    answer = chatted("recorded/vllm")
    assert answer.content == "Let me look."


@pytest.mark.parametrize("folder", WRITTEN_CHATS)
def test_a_written_chat_with_a_thought_and_a_call(folder: str) -> None:
    answer = chatted(folder)
    assert answer.content == "Let me look."
    assert answer.reasoning == "Which city?"
    [call] = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert call.id


def chatted(folder: str) -> ParsedAnswer:
    deltas, asked = played(folder, CHAT)
    assert asked.body["tools"] == [WEATHER]
    assert asked.body["tool_choice"] == "auto", "some servers take silence for none"
    assert deltas[-1].finish is FinishReason.STOP
    assert deltas[-1].usage.completion_tokens > 0
    return collect(piece for delta in deltas if isinstance(delta, ParsedOutput) for piece in delta.pieces)


@pytest.mark.parametrize("folder", RECORDED)
def test_a_recorded_refusal_keeps_its_words(folder: str) -> None:
    check_refusal(folder)


@pytest.mark.parametrize("folder", WRITTEN)
def test_a_written_refusal_keeps_its_words(folder: str) -> None:
    check_refusal(folder)


def check_refusal(folder: str) -> None:
    async def go() -> None:
        async with await peer_of(folder) as peer:

            async def refuses(reply: Reply, asked: Asked) -> None:
                await reply.head(422 if folder == "written/mindie" else 400, "application/json")
                await reply.write(exchanged(folder, "refusal.json"))

            peer.answers["/v1/completions"] = refuses
            async with connected(peer) as engine:
                with pytest.raises(InvalidRequest) as refusal:
                    await engine.submit(sample("hi", PARAMS))
        body = json.loads(exchanged(folder, "refusal.json"))
        said = body.get("message") or body["error"]
        assert str(refusal.value).endswith(said["message"] if isinstance(said, dict) else said)

    asyncio.run(go())


def test_who_it_is_is_found_out() -> None:
    for folder, owner in zip((*RECORDED, *WRITTEN), ("vllm", "llamacpp", "tensorrt_llm", "MindIE Server"), strict=True):
        [card] = msgspec.json.decode(exchanged(folder, "models.json"))["data"]
        assert card["owned_by"] == owner
        assert kind_of(owner, "").owner == owner
    assert kind_of("someone", "llama.cpp").owner == "llamacpp"
    assert kind_of("openai", "cloudflare") is OTHER
    assert kind_of("", "") is OTHER


# What is said, by kind.

EVERYTHING = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    seed=0,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias={3: 1.0},
    max_tokens=9,
    min_tokens=2,
    stop=("x",),
    stop_token_ids=(4,),
    ignore_eos=True,
    speculative=False,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
)
ALL_KINDS = (*KINDS, OTHER)


class Able(Struct, frozen=True):
    name: str
    abilities: Abilities


by_name = pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)


def asked_as_text(kind: ServerKind, params: SamplingParams, **more: Any) -> dict[str, Any]:
    told = {"priority": 0, "cache_salt": ""} | more
    return PeerRequestWriter("remote", kind, "model").text("hi", params, **told).body


@by_name
def test_what_a_kind_takes_is_said_under_its_name_and_nothing_else_is(kind: ServerKind) -> None:
    body = asked_as_text(kind, EVERYTHING, priority=3, cache_salt="salt")
    own = {field: getattr(EVERYTHING, name, None) for name, field in kind.fields.items()}
    own |= {
        field: {"priority": 3, "cache_salt": "salt"}[name]
        for name, field in kind.fields.items()
        if name in ("priority", "cache_salt")
    }
    if "logit_bias" in own:
        own["logit_bias"] = {"3": 1.0}
    if kind.timings:
        own["return_timings"] = True
    rest = {"model", "stream", "stream_options", "prompt"}
    assert {name: value for name, value in body.items() if name not in rest} == own
    msgspec.json.encode(body)


@by_name
def test_neutral_values_are_said_too(kind: ServerKind) -> None:
    """A server has defaults of its own: llama.cpp keeps 40 tokens, vLLM reads the model's generation config."""
    body = asked_as_text(kind, SamplingParams(max_tokens=1))
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if name in kind.fields:
            assert body[kind.fields[name]] == getattr(SamplingParams(), name)
    assert body.get("top_k") == (0 if "top_k" in kind.fields and not kind.silent_top_k else None)
    for name in ("seed", "stop", "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos", "priority"):
        assert name not in body


@by_name
@pytest.mark.parametrize("tokens", [True, False])
def test_what_a_kind_does_not_take_is_refused(kind: ServerKind, tokens: bool) -> None:
    engine = Able(name="remote", abilities=abilities_of(kind, tokens=tokens))
    changes = {
        name: getattr(EVERYTHING, name)
        for name in EVERYTHING.__struct_fields__
        if getattr(EVERYTHING, name) != getattr(SamplingParams(), name)
    }
    told = tokens and bool(kind.token_answers)
    done_here = {"stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"} if told else set()
    for name, value in changes.items():
        params = SamplingParams(**{name: value} | ({"max_tokens": 9} if name == "min_tokens" else {}))
        if name in kind.fields or name in done_here:
            check_abilities(engine, sample("hi", params))
        else:
            with pytest.raises(InvalidRequest, match=f"{name} is not supported by the engine remote") as refusal:
                check_abilities(engine, sample("hi", params))
            assert refusal.value.param == name
    for name, value in (("priority", 1), ("cache_salt", "s"), ("adapter", "a")):
        if name not in kind.fields:
            with pytest.raises(InvalidRequest, match=name):
                check_abilities(engine, sample("hi", **{name: value}))
    if engine.abilities.logprobs:
        check_abilities(engine, sample("hi", SamplingParams(logprobs=1)))
    else:
        with pytest.raises(InvalidRequest, match="logprobs") as refusal:
            check_abilities(engine, sample("hi", SamplingParams(logprobs=1)))
        assert ("--tokenizer" in str(refusal.value)) is abilities_of(kind, tokens=True).logprobs, "where it would help"


def test_prompt_embeds_are_refused_by_name_and_told_where_they_are_taken() -> None:
    rows = PromptEmbeds(data=memoryview(bytes(8)), shape=(1, 2), dtype="float32")
    for abilities in (VLLM_ABILITIES, *(abilities_of(kind, tokens=True) for kind in KINDS)):
        with pytest.raises(InvalidRequest, match=r"the engine other takes no prompt embeds.*--engine native"):
            check_abilities(Able(name="other", abilities=abilities), sample(MixedPrompt.of([[1], rows])))


def test_every_ability_of_sampling_is_asked_about() -> None:
    beside = {
        "tokens",
        "answer_tokens",
        "with_tokenizer",
        "priority",
        "fair_shares",
        "cache_salt",
        "embeddings",
        "images",
        "lora",
        "prompt_embeds",
    }
    assert {rule.ability for rule in FIELD_RULES} | beside == set(Abilities.__struct_fields__)


# What an output must be.

SPECS: dict[str, OutputSpec] = {
    "object": JsonObjectSpec(),
    "schema": JsonSchemaSpec(schema=SCHEMA),
    "regex": RegexSpec(pattern="a+"),
    "choice": ChoiceSpec(options=["a", "b"]),
    "lark": LarkSpec(text='start: "a"'),
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
OBJECT = {"response_format": {"type": "json_object"}}


def shape(kind: ServerKind, spec: str, *, chat: bool) -> dict[str, Any] | None:
    params = SamplingParams(max_tokens=9, grammar=encode_spec(SPECS[spec], 64))
    asker = PeerRequestWriter("remote", kind, "model")
    try:
        if chat:
            question = asker.chat(CHAT, params, priority=0, cache_salt="")
        else:
            question = asker.text("hi", params, priority=0, cache_salt="")
    except InvalidRequest as refusal:
        assert "not supported by the engine remote" in str(refusal)
        return None
    plain = {name for name, value in vars_of(asker, chat).items() if question.body.get(name) == value}
    return {name: value for name, value in question.body.items() if name not in plain}


def vars_of(asker: PeerRequestWriter, chat: bool) -> dict[str, Any]:
    params = SamplingParams(max_tokens=9)
    if chat:
        return asker.chat(CHAT, params, priority=0, cache_salt="").body
    return asker.text("hi", params, priority=0, cache_salt="").body


def test_forms_are_asked_for_as_each_kind_wants_it() -> None:
    weft, vllm, llama, tensorrt, mindie = KINDS
    for kind in (weft, vllm):
        for chat in (True, False):
            assert shape(kind, "object", chat=chat) == {"structured_outputs": {"json_object": True}}
            assert shape(kind, "schema", chat=chat) == {"structured_outputs": {"json": SCHEMA}}
            assert shape(kind, "regex", chat=chat) == {"structured_outputs": {"regex": "a+"}}
            assert shape(kind, "choice", chat=chat) == {"structured_outputs": {"choice": ["a", "b"]}}
            assert shape(kind, "lark", chat=chat) == {"structured_outputs": {"grammar": 'start: "a"'}}
    for kind in (tensorrt, mindie, OTHER):
        for chat in (True, False):
            assert shape(kind, "object", chat=chat) == OBJECT
            assert shape(kind, "schema", chat=chat) == {"response_format": FORMAT}
            assert shape(kind, "choice", chat=chat) is None
            assert shape(kind, "lark", chat=chat) is None
    assert shape(llama, "schema", chat=True) == {"response_format": FORMAT}
    assert shape(llama, "schema", chat=False) == {"json_schema": SCHEMA}
    assert shape(llama, "object", chat=False) == {"json_schema": {"type": "object"}}
    assert shape(llama, "regex", chat=True) is None
    assert shape(tensorrt, "regex", chat=True) == {"response_format": {"type": "regex", "regex": "a+"}}
    assert shape(mindie, "regex", chat=True) is None


def test_templates_are_told_only_what_a_kind_passes_on() -> None:
    weft, _, _, tensorrt, mindie = KINDS
    continued = Conversation(messages=CHAT.messages, add_generation_prompt=False, continue_final_message=True)
    thinking = Conversation(messages=CHAT.messages, template_variables={"enable_thinking": False})
    odd = Conversation(messages=CHAT.messages, template_variables={"colour": "red"})

    def told(kind: ServerKind, chat: Conversation) -> set[str]:
        plain = Conversation(messages=CHAT.messages)
        asker = PeerRequestWriter("remote", kind, "model")
        bodies = [asker.chat(c, PARAMS, priority=0, cache_salt="").body for c in (chat, plain)]
        return bodies[0].keys() - bodies[1].keys()

    assert told(weft, continued) == {"add_generation_prompt", "continue_final_message"}
    assert told(weft, odd) == told(mindie, thinking) == {"chat_template_kwargs"}
    for kind, chat, field in (
        (tensorrt, continued, "continue_final_message"),
        (mindie, odd, "chat_template_kwargs.colour"),
        (OTHER, thinking, "chat_template_kwargs.enable_thinking"),
        (OTHER, continued, "add_generation_prompt"),
    ):
        with pytest.raises(InvalidRequest, match=f"{field} is not supported by the engine remote"):
            told(kind, chat)


def test_a_text_without_a_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--tokenizer"):
        asked_as_text(OTHER, SamplingParams())
