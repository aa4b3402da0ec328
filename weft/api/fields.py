"""The rule for the fields of a request's body, and the table of those that Weft does not honour.

A schema has the fields that are honoured. The table has the hints, published fields without which an answer is not
wrong: they are accepted, and named in the answer's header. It also has the impossible ones, which ask for what the
answer would lack: they are refused. What stands in neither is unknown, and refused with the nearest name that is known.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from weft.errors import shown
from weft.serving.request import FieldReport

MAX_NAME_CHARS = 64
"""No field has a longer name."""


class Rule(Struct, frozen=True):
    """What becomes of a field that is known and not honoured."""

    why: str
    neutral: tuple[object, ...] = ()
    """Values that ask for nothing: they pass without a word."""
    possible: bool = True
    """False: the answer would lack what it asks for."""

    def passes(self, value: object) -> bool:
        return any(type(value) is type(empty) and value == empty for empty in self.neutral)


def hint(why: str, *neutral: object) -> Rule:
    return Rule(why, neutral)


def impossible(why: str, *neutral: object) -> Rule:
    return Rule(why, neutral, possible=False)


_KEY = "who asks is told by the key"
_ONE_TIER = "there is one tier; `priority` orders requests"
_PREFIX_CACHE = "prompts that begin alike share their cached part anyway; `cache_salt` parts them"
_TEXT_ALONE = "answers are text"
_NO_SEARCH = "nothing is searched for"
_NO_MODERATION = "no answer is moderated"
_SAMPLER = "there is no such sampler"
_ROOM = "the context is as long as the server's --max-model-len"

_OPENAI: Mapping[str, Rule] = {
    "moderation": hint(_NO_MODERATION),
    "prompt_cache_key": hint(_PREFIX_CACHE),
    "prompt_cache_options": hint(_PREFIX_CACHE),
    "prompt_cache_retention": hint(_PREFIX_CACHE, "in_memory", "in-memory"),
    "safety_identifier": hint(_KEY),
    "service_tier": hint(_ONE_TIER, "auto", "default"),
}
_LOCAL_SERVERS: Mapping[str, Rule] = {
    # Fields of vLLM's.
    "allowed_token_ids": impossible(_SAMPLER, []),
    "bad_words": impossible(_SAMPLER, []),
    "detokenize": impossible("text is always written", True),
    "early_stopping": impossible("there is no beam search", False),
    "guided_decoding_backend": hint("there is one"),
    "guided_whitespace_pattern": hint("white space in constrained JSON is bounded already"),
    "kv_transfer_params": impossible("no cache is moved between servers"),
    "length_penalty": impossible("there is no beam search", 1.0, 1),
    "logits_processors": impossible("clients bring no code", []),
    "mm_processor_kwargs": hint("there is no processor of images"),
    "spaces_between_special_tokens": hint("the tokenizer writes them as it does", True),
    "use_beam_search": impossible("there is no beam search", False),
    "vllm_xargs": hint("there are no such extensions", {}),
    # Fields of llama.cpp's and Ollama's.
    "cache_prompt": hint(_PREFIX_CACHE, True),
    "dry_multiplier": impossible(_SAMPLER, 0.0, 0),
    "dynatemp_range": impossible(_SAMPLER, 0.0, 0),
    "id_slot": hint("the scheduler gives requests their rows", -1),
    "keep_alive": hint("the operator says how long models stay in memory"),
    "mirostat": impossible(_SAMPLER, 0),
    "n_keep": hint("no prompt is cut without leave"),
    "num_ctx": hint(_ROOM),
    "options": hint("its settings have fields of their own here", {}),
    "reasoning_format": hint("reasoning is always told apart", "auto", "deepseek"),
    "samplers": hint("samplers have one order"),
    "timings_per_token": hint("`return_timings` gives them", False),
    "top_n_sigma": impossible(_SAMPLER, -1.0, -1, 0.0, 0),
    "typical_p": impossible(_SAMPLER, 1.0, 1),
    "xtc_probability": impossible(_SAMPLER, 0.0, 0),
}
_CACHE_CONTROL: Mapping[str, Rule] = {"cache_control": hint(_PREFIX_CACHE)}
_FUNCTION: Mapping[str, Rule] = {
    "allowed_callers": hint("only the client's own code calls tools", ["direct"]),
    "async": hint("answers come when they are ready", False),
    "defer_loading": hint("the model is told of all tools", False),
    "output_schema": hint("results are taken as they come"),
}
_CALL: Mapping[str, Rule] = {
    "async": hint("answers come when they are ready", False),
    "caller": hint("only the client's own code calls tools", {"type": "direct"}),
}
_MESSAGES: Mapping[str, Rule] = {
    "betas": hint("beta features are on, where they are here"),
    "cache_control": hint(_PREFIX_CACHE),
    "container": hint("the server runs no code"),
    "context_management": hint("the client's own context is taken as it is sent"),
    "diagnostics": hint("the log and /metrics have them"),
    "inference_geo": hint("there is one place"),
    "mcp_servers": hint("the server calls no tools", []),
    "metadata": hint(_KEY),
    "service_tier": hint(_ONE_TIER, "auto", "standard_only"),
    "speed": hint("there is one speed", "standard"),
    "user_profile_id": hint(_KEY),
    "workspace_id": hint(_KEY),
}

RULES: Mapping[str, Mapping[str, Rule]] = {
    "chat": {
        **_OPENAI,
        **_LOCAL_SERVERS,
        "audio": impossible(_TEXT_ALONE),
        "chat_template": impossible("the model has its own"),
        "documents": impossible("put them into the messages", []),
        "metadata": hint("it labels answers that OpenAI keeps; here none are", {}),
        "modalities": impossible(_TEXT_ALONE, ["text"]),
        "separate_reasoning": hint("reasoning is always told apart", True),
        "store": hint("chats are not kept; /v1/responses keeps answers", False),
        "stream_reasoning": hint("reasoning is streamed as it comes", True),
        "user": hint(_KEY),
        "verbosity": hint("the model is not told of it", "medium"),
        "web_search_options": hint(_NO_SEARCH),
    },
    "chat.messages": {
        **_CACHE_CONTROL,
        "annotations": hint("they are about an earlier answer", []),
        "audio": impossible("the model hears nothing"),
        "provider_specific_fields": hint("they are another server's"),
        "refusal": hint("the content says it"),
        "reasoning_details": hint("`reasoning_content` has the text"),
    },
    "chat.messages.content": {**_CACHE_CONTROL, "prompt_cache_breakpoint": hint(_PREFIX_CACHE)},
    "chat.messages.tool_calls": {
        "index": hint("a call is told by its `id`"),
        "extra_content": hint("it is another server's"),
        "provider_specific_fields": hint("it is another server's"),
    },
    "chat.tools": _CACHE_CONTROL,
    "chat.tools.function": _FUNCTION,
    "chat.structured_outputs": {
        "disable_additional_properties": hint("the schema says it", False),
        "disable_any_whitespace": hint("white space is bounded already"),
        "disable_fallback": hint("there is one grammar engine"),
        "structural_tag": impossible("`tools` and `strict` do that"),
        "whitespace_pattern": hint("white space is bounded already"),
    },
    "chat.stream_options": {"include_obfuscation": hint("chunks are not padded", False)},
    "completions": {
        **_OPENAI,
        **_LOCAL_SERVERS,
        "store": hint("answers are not kept", False),
        "user": hint(_KEY),
    },
    "responses": {
        **_OPENAI,
        "access_programs": hint(_KEY),
        "background": impossible("answers are waited for", False),
        "client_metadata": hint("it is the client's own"),
        "context_management": hint("`truncation` says what becomes of a long prompt", []),
        "conversation": impossible("there are no stored conversations; `previous_response_id` goes on from an answer"),
        "image": impossible(_TEXT_ALONE),
        "prompt": impossible("there are no stored prompts"),
        "stream_options": hint("no option of it is here"),
    },
    "responses.input": {
        **_CALL,
        "encrypted_content": hint("reasoning is in plain text here"),
        "internal_chat_message_metadata_passthrough": hint("it is the client's own"),
        "metadata": hint("it is the client's own"),
        "name": hint("a result is told by its `call_id`"),
        "phase": hint("the order of the messages says it"),
    },
    "responses.input.content": {
        "annotations": hint("they are about an earlier answer", []),
        "logprobs": hint("they are about an earlier answer", []),
        "prompt_cache_breakpoint": hint(_PREFIX_CACHE),
    },
    "responses.tools": _FUNCTION,
    "responses.text": {"verbosity": hint("the model is not told of it", "medium")},
    "responses.reasoning": {
        "context": hint("the template decides what the model sees of it", "auto"),
        "generate_summary": hint("reasoning is given in full", "auto"),
        "mode": hint("there is one", "standard"),
        "summary": hint("reasoning is given in full", "auto"),
    },
    "messages": _MESSAGES,
    "messages.messages.content": {
        **_CALL,
        **_CACHE_CONTROL,
        "citations": hint("they are about an earlier answer", []),
        "data": hint("only its vendor can read it"),
        "signature": hint("thoughts are in plain text here"),
        "toolset_name": hint("a tool is told by its `name`"),
    },
    "messages.tools": {
        **_FUNCTION,
        **_CACHE_CONTROL,
        "eager_input_streaming": hint("arguments are streamed as they come", True),
        "input_examples": hint("the model is not told of them", []),
    },
    "messages.output_config": {"task_budget": hint("`max_tokens` ends the answer")},
    "embeddings": {**_OPENAI, **_LOCAL_SERVERS, "user": hint(_KEY)},
    "images": {
        **_OPENAI,
        "background": impossible("images are opaque", "auto", "opaque"),
        "complexity": impossible("there is no such image"),
        "frame_count": impossible("images do not move"),
        "frame_duration_ms": impossible("images do not move"),
        "moderation": hint(_NO_MODERATION, "auto", "low"),
        "output_compression": hint("PNG loses nothing", 100),
        "quality": hint("`num_inference_steps` says it", "auto", "standard"),
        "style": hint("the prompt says it", "natural"),
        "svg": impossible("images are made of pixels"),
        "user": hint(_KEY),
    },
}
"""The rules by the place of a field: the interface, and below it the object that has the field."""


VENDOR_TOOLS = re.compile(
    r"(advisor|apply_patch|bash|code_execution|code_interpreter|computer|computer_use|custom|file_search|"
    r"image_generation|local_shell|mcp|mcp_toolset|memory|namespace|shell|text_editor|tool_search(_tool\w{0,40})?|"
    r"web_fetch|web_search)(_preview)?(_[0-9]{4}_?[0-9]{2}_?[0-9]{2})?"
)
"""Types of tools that OpenAI and Anthropic publish beside functions: what they do is known to their models alone."""


def client_tools(own: str) -> Callable[[object, ValidationInfo], object]:
    """Return what takes the tools of a request that clients run, by their type, from those that only a vendor's model
    or server can use."""

    def is_left_aside(tool: object, report: FieldReport) -> bool:
        kind = tool.get("type", own) if isinstance(tool, dict) else own
        if kind == own or not isinstance(kind, str) or len(kind) > MAX_NAME_CHARS:
            return False
        is_known = VENDOR_TOOLS.fullmatch(kind) is not None
        if report.mode == "strict" or not (is_known or report.mode == "tolerant"):
            return False
        report.leave_aside(f"tools.tools.{kind}", known=is_known)
        return True

    def taken(value: object, info: ValidationInfo) -> object:
        report: FieldReport = info.context or FieldReport()
        return [tool for tool in value if not is_left_aside(tool, report)] if isinstance(value, list) else value

    return taken


class Fields(BaseModel):
    """An object of a request: types are strict, null means absent, and every field has a rule."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    place: ClassVar[str] = ""
    """Its place in `RULES`; empty: an object that no client sends by itself."""

    @model_validator(mode="before")
    @classmethod
    def _by_the_rules(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.alias or name for name, field in cls.model_fields.items()]
        return honoured_fields(value, known, cls.place, info.context or FieldReport())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        _describe(handler.resolve_ref_schema(schema), RULES.get(cls.place, {}))
        return schema


def honoured_fields(
    value: Mapping[str, Any], known: Collection[str], place: str, report: FieldReport
) -> dict[str, Any]:
    """Return an object's fields without its nulls and hints. Raises for what is impossible or unknown."""
    rules = RULES.get(place, {})
    kept = {}
    for name, item in value.items():
        if name in known:
            if item is not None:
                kept[name] = item
            continue
        rule = rules.get(name)
        if rule is None:
            if report.mode != "tolerant":
                refusal = {"field": name, "hint": nearest(name, [*known, *rules])}
                raise PydanticCustomError("unknown_field", "there is no such field.{hint}", refusal)
            report.leave_aside(f"{place}.{name}", known=False)
        elif item is not None and not rule.passes(item):
            if not rule.possible or report.mode == "strict":
                refusal = {"field": name, "said": _said(item), "why": rule.why}
                raise PydanticCustomError("not_supported", "{said} is not supported: {why}.", refusal)
            report.leave_aside(f"{place}.{name}")
    return kept


def nearest(name: str, known: Collection[str]) -> str:
    # The matcher takes quadratic time.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(name) <= MAX_NAME_CHARS else ()
    return f" Did you mean {close[0]!r}?" if close else ""


def rules_table() -> str:
    """Return the table of docs/API.md: every field that is known and not honoured, with the interfaces that have it."""
    rows: dict[tuple[bool, str, str, str], list[str]] = {}
    for place, rules in RULES.items():
        interface, _, below = place.partition(".")
        for name, rule in rules.items():
            row = not rule.possible, f"{below}.{name}".lstrip("."), _kind(rule), rule.why
            rows.setdefault(row, []).append(interface)
    lines = ["| field | of | | why |", "|---|---|---|---|"]
    for (_, name, kind, why), interfaces in sorted(rows.items()):
        lines.append(f"| `{name}` | {', '.join(interfaces)} | {kind} | {why} |")
    return "\n".join(lines) + "\n"


def _kind(rule: Rule) -> str:
    if rule.possible:
        return "hint"
    values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in rule.neutral)
    return f"refused, but for {values}" if values else "refused"


def _describe(schema: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Let an object's description say that null is taken for a field that may be absent, and which fields are hints."""
    fields = schema.setdefault("properties", {})
    for name in fields.keys() - schema.get("required", ()):
        field = fields[name]
        if {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            fields[name] = {"anyOf": [field, {"type": "null"}], **about}
    for name, rule in rules.items():
        if rule.possible:
            fields.setdefault(name, {"description": f"Accepted without effect: {rule.why}."})
        else:
            fields.setdefault(name, {"enum": [None, *rule.neutral], "description": f"Not supported: {rule.why}."})


def _said(value: object) -> str:
    """Return the value when it is short enough to name."""
    return said if isinstance(value, str | int | float) and len(said := shown(value)) < 40 else "it"
