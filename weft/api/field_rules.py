"""The table of the fields that are known and not honoured, by the interface that has them.

A hint is a published field without which an answer is not wrong: it is accepted, and named in the answer's header. An
impossible one asks for what the answer would lack: it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct


class Rule(Struct, frozen=True):
    """A rule says what becomes of a field that is known and not honoured."""

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
_NO_PROGRESS = "a prompt's progress is not told"
_ROOM = "the context is as long as the server's --max-model-len"

_OPENAI: Mapping[str, Rule] = {
    "moderation": hint(_NO_MODERATION),
    "prompt_cache_options": hint(_PREFIX_CACHE),
    "prompt_cache_retention": hint(_PREFIX_CACHE, "in_memory", "in-memory"),
    "safety_identifier": hint(_KEY),
    "service_tier": hint(_ONE_TIER, "auto", "default"),
}
_CACHE_KEY: Mapping[str, Rule] = {"prompt_cache_key": hint(_PREFIX_CACHE)}
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
    "return_progress": hint(_NO_PROGRESS, False),
    "samplers": hint("samplers have one order"),
    "timings_per_token": hint("`return_timings` gives them", False),
    "top_n_sigma": impossible(_SAMPLER, -1.0, -1, 0.0, 0),
    "typical_p": impossible(_SAMPLER, 1.0, 1),
    "verbose": hint("`return_token_ids` gives the prompt", False),
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
_SCHEMA: Mapping[str, Rule] = {"description": hint("the model is not told of it")}
_MESSAGES: Mapping[str, Rule] = {
    "betas": hint("beta features are on, where they are here"),
    "cache_control": hint(_PREFIX_CACHE),
    "compaction": impossible("no conversation is summarised"),
    "container": hint("the server runs no code"),
    "context_management": hint("the client's own context is taken as it is sent"),
    "diagnostics": hint("the log and /metrics have them"),
    "fallback_credit_token": hint("nothing is billed"),
    "fallbacks": hint("the model answers whatever it is asked"),
    "inference_geo": hint("there is one place"),
    "mcp_servers": hint("the server calls no tools", []),
    "service_tier": hint(_ONE_TIER, "auto", "standard_only"),
    "speed": hint("there is one speed", "standard"),
    "thread": impossible("there are no stored conversations; send all messages"),
    "user_profile_id": hint(_KEY),
    "workspace_id": hint(_KEY),
}
_MEMORY = "the operator says what is in memory, and where"
_WINDOW = "penalties look at the whole prompt and answer"
_TYPES = "the operator says it with --dtype"

_SAMPLERS: Mapping[str, Rule] = {
    "mirostat": hint(_SAMPLER),
    "mirostat_eta": hint(_SAMPLER),
    "mirostat_tau": hint(_SAMPLER),
    "repeat_last_n": hint(_WINDOW),
    "typical_p": hint(_SAMPLER),
}
_OLLAMA: Mapping[str, Rule] = {
    "context": hint("answers give none: the conversation is in `messages`"),
    "keep_alive": hint("the operator says how long models stay in memory"),
    "shift": hint(_ROOM),
    "truncate": hint("a prompt that is too long is refused"),
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
    "chat.response_format.json_schema": _SCHEMA,
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
        "client_metadata": hint("it is the client's own"),
        "context_management": hint("`truncation` says what becomes of a long prompt", []),
        "conversation": impossible("there are no stored conversations; `previous_response_id` goes on from an answer"),
        "image": impossible(_TEXT_ALONE),
        "prompt": impossible("there are no stored prompts"),
        "return_progress": hint(_NO_PROGRESS, False),
        "stream_options": hint("no option of it is here"),
        "timings_per_token": hint("answers have no timings", False),
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
    "responses.text.format": _SCHEMA,
    "responses.reasoning": {
        "context": hint("the template decides what the model sees of it", "auto"),
        "generate_summary": hint("reasoning is given in full", "auto"),
        "mode": hint("there is one", "standard"),
        "summary": hint("reasoning is given in full", "auto"),
    },
    "messages": _MESSAGES,
    "messages.metadata": {},
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
    "messages.thinking": {"budget_tokens": hint("`max_tokens` ends the answer")},
    "messages.output_config": {"task_budget": hint("`max_tokens` ends the answer")},
    "embeddings": {**_OPENAI, **_CACHE_KEY, **_LOCAL_SERVERS, "user": hint(_KEY)},
    "images": {
        **_OPENAI,
        **_CACHE_KEY,
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
    "ollama.embed": {
        "keep_alive": hint("the operator says how long models stay in memory"),
        "options": hint("no option changes a vector"),
    },
    "ollama.models": {
        "insecure": hint("hubs are always asked over TLS"),
        "verbose": hint("all that is known is told"),
        "system": hint("it is no part of the model"),
        "template": hint("it is no part of the model"),
        "options": hint("it is no part of the model"),
    },
    "ollama.messages.tool_calls": {"type": hint("all calls are of functions")},
    "ollama.messages.tool_calls.function": {
        "description": hint("the tools have it"),
        "index": hint("the order of the calls says it"),
    },
    "ollama.options": {
        **_SAMPLERS,
        "draft_num_predict": hint("the operator says it with --speculative-model"),
        "embedding_only": hint(_MEMORY),
        "f16_kv": hint(_TYPES),
        "logits_all": hint("`logprobs` gives them"),
        "low_vram": hint(_MEMORY),
        "main_gpu": hint(_MEMORY),
        "num_batch": hint("the operator says it with --max-num-batched-tokens"),
        "num_ctx": hint(_ROOM),
        "num_gpu": hint(_MEMORY),
        "num_gqa": hint("the model's files say it"),
        "num_keep": hint("no prompt is cut"),
        "num_thread": hint("the operator says it with --threads"),
        "numa": hint(_MEMORY),
        "penalize_newline": hint(_WINDOW),
        "rope_frequency_base": hint("the model's files say it"),
        "rope_frequency_scale": hint("the model's files say it"),
        "tfs_z": hint(_SAMPLER),
        "use_mlock": hint(_MEMORY),
        "use_mmap": hint(_MEMORY),
        "vocab_only": hint(_MEMORY),
    },
    "llamacpp.completion": {
        **_SAMPLERS,
        "lora": impossible("the model's name says it", []),
        "n_cmpl": impossible("an answer is one", 1),
        "response_fields": impossible("answers are whole", []),
        "cache_prompt": hint("prompts that begin alike share their cached part anyway"),
        "dry_allowed_length": hint(_SAMPLER),
        "dry_base": hint(_SAMPLER),
        "dry_multiplier": hint(_SAMPLER),
        "dry_penalty_last_n": hint(_SAMPLER),
        "dry_sequence_breakers": hint(_SAMPLER),
        "dynatemp_exponent": hint(_SAMPLER),
        "dynatemp_range": hint(_SAMPLER),
        "id_slot": hint("the scheduler gives requests their rows"),
        "min_keep": hint(_SAMPLER),
        "n_discard": hint(_ROOM),
        "n_indent": hint(_SAMPLER),
        "n_keep": hint("no prompt is cut"),
        "post_sampling_probs": hint("log probabilities are those before sampling"),
        "repeat_last_n": hint(_WINDOW),
        "return_progress": hint(_NO_PROGRESS),
        "samplers": hint("samplers have one order"),
        "t_max_predict_ms": hint("the operator says it with --request-timeout-s"),
        "timings_per_token": hint("the last piece has the timings"),
        "top_n_sigma": hint(_SAMPLER),
        "xtc_probability": hint(_SAMPLER),
        "xtc_threshold": hint(_SAMPLER),
    },
    "ollama.chat": {**_OLLAMA, "_debug_render_only": impossible("answers are always computed", False)},
    "ollama.generate": {
        **_OLLAMA,
        "_debug_render_only": impossible("answers are always computed", False),
        "height": impossible(_TEXT_ALONE, 0),
        "images": impossible("the model sees nothing", []),
        "steps": impossible(_TEXT_ALONE, 0),
        "template": impossible("the model has its own", ""),
        "width": impossible(_TEXT_ALONE, 0),
    },
    "ollama.messages": {"images": impossible("the model sees nothing", [])},
    "grpc.metadata": {
        "extra": hint("it is the client's own"),
        "locale": hint("the prompt says it"),
        "player_id": hint(_KEY),
        "tenant": hint(_KEY),
    },
    "llamacpp.tokenize": {"parse_special": impossible("special tokens are always read", True)},
}
"""The rules by the place of a field: the interface, and below it the object that has the field."""


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
