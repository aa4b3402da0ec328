"""The servers that are known, and what each takes. What is not in this table is refused, never sent and hoped for.

Every fact here has its source in docs/engines/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from weft.backends.contract import Abilities
from weft.text.grammars.specs import ChoiceSpec, JsonObjectSpec, JsonSchemaSpec, LarkSpec, OutputSpec, RegexSpec

Body = dict[str, Any]

Shape = Callable[[OutputSpec, bool], Body | None]
"""The fields that ask for an output of this form, in a chat or in a plain completion; None: it cannot be asked for."""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def structured_outputs(spec: OutputSpec, in_chat: bool) -> Body:
    match spec:
        case JsonObjectSpec():
            asked: Body = {"json_object": True}
        case JsonSchemaSpec(schema=schema):
            asked = {"json": schema}
        case RegexSpec(pattern=pattern):
            asked = {"regex": pattern}
        case ChoiceSpec(options=options):
            asked = {"choice": list(options)}
        case LarkSpec(text=text):
            asked = {"grammar": text}
    return {"structured_outputs": asked}


def response_format(spec: OutputSpec, in_chat: bool) -> Body | None:
    match spec:
        case JsonObjectSpec():
            return {"response_format": {"type": "json_object"}}
        case JsonSchemaSpec(schema=schema):
            named = {"name": "answer", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        case _:
            return None


def response_format_or_regex(spec: OutputSpec, in_chat: bool) -> Body | None:
    if isinstance(spec, RegexSpec):
        return {"response_format": {"type": "regex", "regex": spec.pattern}}
    return response_format(spec, in_chat)


def json_schema(spec: OutputSpec, in_chat: bool) -> Body | None:
    """Return the response_format of a chat; other requests have none."""
    match spec:
        case _ if in_chat:
            return response_format(spec, in_chat)
        case JsonObjectSpec():
            return {"json_schema": {"type": "object"}}
        case JsonSchemaSpec(schema=schema):
            return {"json_schema": schema}
        case _:
            return None


class ServerKind(Struct, frozen=True, kw_only=True):
    name: str
    owner: str = ""
    """The `owned_by` of its models."""
    fields: Mapping[str, str]
    """The fields that its requests may have, by our names for them."""
    silent_top_k: bool = False
    """True when a request without top_k keeps all tokens; else 0 says so."""
    template_fields: frozenset[str] = frozenset()
    """Those of add_generation_prompt and continue_final_message that it knows."""
    template_variables: frozenset[str] | None = frozenset()
    """The chat_template_kwargs that it knows; None: any."""
    token_answers: Mapping[str, Any] = {}
    """The fields that make a completion tell its token ids; empty: nothing does."""
    logprobs: bool = False
    """True when it tells the ids of the likeliest tokens, if it tells ids at all."""
    prompt_logprobs: bool = False
    grammars: bool = False
    """Takes grammars in Lark for an output of tokens."""
    shape: Shape = response_format
    running_usage: bool = False
    """True when it tells the usage with every chunk, if it is asked to."""
    timings: bool = False
    """True when it tells with the end of an answer how long it took, if it is asked to (`return_timings`)."""
    seeds_by_position: bool = False
    """A seed gives the same tokens whether an answer is generated in one go or continued."""
    embeddings: bool = False


OPENAI = _same(
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "max_tokens", "logit_bias"
)
FULL = OPENAI | _same(
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
TEMPLATE_FIELDS = frozenset({"add_generation_prompt", "continue_final_message"})

WEFT = ServerKind(
    name="Weft",
    owner="weft",
    fields=FULL | _same("priority", "cache_salt", "speculative"),
    template_fields=TEMPLATE_FIELDS,
    template_variables=None,
    token_answers={"return_token_ids": True},
    logprobs=True,
    prompt_logprobs=True,
    grammars=True,
    shape=structured_outputs,
    running_usage=True,
    timings=True,
    seeds_by_position=True,
    embeddings=True,
)
VLLM = ServerKind(
    name="vLLM",
    owner="vllm",
    fields=FULL | _same("priority", "cache_salt"),
    template_fields=TEMPLATE_FIELDS,
    template_variables=None,
    token_answers={"return_token_ids": True},
    logprobs=True,
    grammars=True,
    shape=structured_outputs,
    running_usage=True,
)
LLAMA_CPP = ServerKind(
    name="llama.cpp",
    owner="llamacpp",
    fields=OPENAI | _same("top_k", "min_p", "ignore_eos") | {"repetition_penalty": "repeat_penalty"},
    template_fields=TEMPLATE_FIELDS,
    template_variables=None,
    shape=json_schema,
)
TENSORRT = ServerKind(
    name="TensorRT-LLM",
    owner="tensorrt_llm",
    fields=FULL,
    template_fields=frozenset({"add_generation_prompt"}),
    template_variables=None,
    token_answers={"detokenize": False},
    shape=response_format_or_regex,
    running_usage=True,
)
MINDIE = ServerKind(
    name="MindIE",
    owner="MindIE Server",
    fields={name: field for name, field in FULL.items() if name not in ("min_p", "min_tokens", "logit_bias")},
    silent_top_k=True,
    template_variables=frozenset({"enable_thinking", "thinking_budget"}),
)
OTHER = ServerKind(name="OpenAI-compatible", fields=OPENAI)

KINDS = (WEFT, VLLM, LLAMA_CPP, TENSORRT, MINDIE)

BY_ENGINE = {"cuda-trt": TENSORRT, "ascend-mindie": MINDIE}
"""Engines of one kind. The others find out with whom they speak."""


def kind_of(owner: str, server: str) -> ServerKind:
    """Return the kind of a server, by the `owned_by` of its model and its `Server` header."""
    for kind in KINDS:
        if owner == kind.owner or (server and server.lower().startswith(kind.name.lower())):
            return kind
    return OTHER


def _with_tokenizer(kind: ServerKind) -> frozenset[str]:
    tells = {"answer_tokens": True, "logprobs": kind.logprobs, "prompt_logprobs": kind.prompt_logprobs}
    return frozenset({"tokens", *(name for name, told in tells.items() if told and kind.token_answers)})


def abilities_of(kind: ServerKind, *, tokens: bool) -> Abilities:
    """Return the abilities with a server of this kind. `tokens`: the model's tokenizer is known on this side."""
    takes = kind.fields.__contains__
    told = tokens and bool(kind.token_answers)
    return Abilities(
        tokens=tokens,
        answer_tokens=told,
        with_tokenizer=frozenset() if tokens else _with_tokenizer(kind),
        seed=takes("seed"),
        penalties=takes("presence_penalty"),
        repetition_penalty=takes("repetition_penalty"),
        top_k=takes("top_k"),
        min_p=takes("min_p"),
        logit_bias=takes("logit_bias"),
        logprobs=told and kind.logprobs,
        prompt_logprobs=told and kind.prompt_logprobs,
        # With the ids of its tokens, an answer is ended and made text on this side.
        stop_tokens=told or takes("stop_token_ids"),
        min_tokens=takes("min_tokens"),
        ignore_eos=takes("ignore_eos"),
        speculative=takes("speculative"),
        prediction=False,
        stop_in_output=told or takes("include_stop_str_in_output"),
        special_tokens=told or takes("skip_special_tokens"),
        grammar=kind.grammars if tokens else True,
        priority=takes("priority"),
        fair_shares=False,
        cache_salt=takes("cache_salt"),
        embeddings=kind.embeddings,
        images=False,
        lora=False,
        prompt_embeds=False,
    )
