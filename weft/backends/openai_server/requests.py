"""The requests to a peer: our parameters under its names."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from weft.backends.contract import not_taken
from weft.backends.openai_server.servers import Body, ServerKind
from weft.errors import InvalidRequest
from weft.text.grammars.specs import decode_spec
from weft.types import Conversation, SamplingParams

NEUTRAL = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Parameters that are always sent: a peer would take its own defaults, which are others than ours."""

WHEN_ASKED = (
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "max_tokens",
)


class PeerRequest(Struct, frozen=True):
    path: str
    body: Body


class PeerRequestWriter:
    """Writes requests for one model of one peer."""

    def __init__(self, engine_name: str, kind: ServerKind, model: str) -> None:
        self._engine_name = engine_name
        self._kind = kind
        self._model = model

    def tokens(self, prompt: list[int], params: SamplingParams, *, priority: int, cache_salt: str) -> PeerRequest:
        """Continue these tokens. Where the answer tells its tokens, it is ended and made text on this side."""
        body = self._body(params, priority, cache_salt)
        body["prompt"] = prompt
        if self._kind.token_answers:
            for field in ("stop", "include_stop_str_in_output", "skip_special_tokens"):
                body.pop(field, None)
            body |= {"stream_options": {"include_usage": True}, **self._kind.token_answers}
        if params.logprobs is not None:
            body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
        if params.prompt_logprobs is not None:
            body["prompt_logprobs"] = params.prompt_logprobs
        if params.grammar:
            body["structured_outputs"] = {"grammar": params.grammar}
        return PeerRequest("completions", body)

    def text(self, prompt: str, params: SamplingParams, *, priority: int, cache_salt: str) -> PeerRequest:
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if params.max_tokens is None:
            raise InvalidRequest(
                "max_tokens must be given: how long the prompt is, the engine "
                f"{self._engine_name} cannot tell without the model's tokenizer.",
                hint="Give it, or let the operator set --tokenizer.",
                param="max_tokens",
            )
        body = self._body(params, priority, cache_salt) | self._shape(params, in_chat=False)
        return PeerRequest("completions", body | {"prompt": prompt})

    def chat(self, chat: Conversation, params: SamplingParams, *, priority: int, cache_salt: str) -> PeerRequest:
        body = self._body(params, priority, cache_salt) | self._shape(params, in_chat=True)
        body["messages"] = list(chat.messages)
        if chat.tools:
            body["tools"] = list(chat.tools)
            body["tool_choice"] = chat.tool_choice or "auto"
            if not chat.parallel_tool_calls:
                body["parallel_tool_calls"] = False
        return PeerRequest("chat/completions", body | self._template(chat))

    def _body(self, params: SamplingParams, priority: int, cache_salt: str) -> Body:
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self._kind.running_usage else {})
        body: Body = {"model": self._model, "stream": True, "stream_options": options}
        for name in NEUTRAL:
            self._say(body, name, getattr(params, name))
        for name in WHEN_ASKED:
            if value := getattr(params, name):
                self._say(body, name, value)
        for name in ("seed", "speculative"):
            if (value := getattr(params, name)) is not None:
                self._say(body, name, value)
        if params.logit_bias:
            self._say(body, "logit_bias", {str(token): bias for token, bias in params.logit_bias.items()})
        if not params.skip_special_tokens:
            self._say(body, "skip_special_tokens", False)
        if self._kind.timings:
            body["return_timings"] = True
        if priority:
            self._say(body, "priority", priority)
        if cache_salt:
            self._say(body, "cache_salt", cache_salt)
        if self._kind.silent_top_k and not params.top_k:
            body.pop("top_k", None)
        return body

    def _say(self, body: Body, name: str, value: Any) -> None:
        """Set a field under its name for this kind. A value that it has no field for was refused before, or is a
        default."""
        if name in self._kind.fields:
            body[self._kind.fields[name]] = value

    def _shape(self, params: SamplingParams, *, in_chat: bool) -> Body:
        if not params.grammar:
            return {}
        spec = decode_spec(params.grammar)
        fields = self._kind.shape(spec, in_chat)
        if fields is None:
            raise not_taken(self._engine_name, spec.param)
        return fields

    def _template(self, chat: Conversation) -> Body:
        """Return the fields for the peer's chat template."""
        asked: Body = {}
        if not chat.add_generation_prompt:
            asked["add_generation_prompt"] = False
        if chat.continue_final_message:
            asked["continue_final_message"] = True
        for field in asked:
            if field not in self._kind.template_fields:
                raise not_taken(self._engine_name, field)
        if chat.template_variables:
            known = self._kind.template_variables
            for name in chat.template_variables:
                if known is not None and name not in known:
                    raise not_taken(self._engine_name, f"chat_template_kwargs.{name}")
            asked["chat_template_kwargs"] = dict(chat.template_variables)
        return asked
