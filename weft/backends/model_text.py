"""The text side of a model, for engines that compute with its tokens: tokenizer, chat template, and the checks that
every prompt passes before an engine sees it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.backends.contract import ChatPrompt, ChatStyles, tokens_of
from weft.checkpoint.model_files import ModelFiles
from weft.checkpoint.tokenizer_assets import text_assets
from weft.errors import ContextTooLong, InvalidRequest, ModelError
from weft.options import ModelOptions
from weft.text.chat_template import ChatTemplate, without_tools
from weft.text.parsers.styles import reasoning_style, tool_style
from weft.text.tokenizer import Tokenizer, num_chars
from weft.types import (
    Adapter,
    GenerationRequest,
    MixedPrompt,
    ModelInfo,
    Request,
    SamplingDefaults,
    SamplingParams,
    TextAssets,
    check_priority,
    check_token_ids,
)

TOLD_STYLE = "hermes"
"""The style of calls of a model that is told of its tools by its system message."""


class ModelText:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        styles: ChatStyles,
        sampling_defaults: SamplingDefaults,
    ) -> None:
        self.tokenizer = tokenizer
        self.styles = styles
        self.sampling_defaults = sampling_defaults
        self._template = template

    def close(self) -> None:
        if self._template is not None:
            self._template.close()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> ChatPrompt:
        if self._template is None:
            raise InvalidRequest(
                "This model has no chat template, so it does not know what a conversation looks like.",
                hint="Send a plain prompt to /v1/completions instead.",
            )
        if max_tokens is not None:
            enough = max_tokens * self.tokenizer.longest_token
            self.tokenizer.check_chars(num_chars([messages, tools, template_variables], enough), max_tokens)
        if not self._template.knows_tools and self.styles.tools is not None:
            messages, tools = without_tools(messages, tools, self.styles.tools.shape), None
        text = self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=template_variables or {},
        )
        return ChatPrompt(text, self.tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens))

    def engine_request(
        self, model: ModelInfo, request: GenerationRequest, params: SamplingParams, adapter: Adapter | None = None
    ) -> Request:
        """Return the request as an engine of this model sees it, with every default resolved. Raises InvalidRequest for
        a prompt that the model cannot answer; the parameters are checked by the caller, or by the engine."""
        prompt_token_ids = tokens_of(request.prompt)
        check_prompt(model, prompt_token_ids, params)
        check_priority(request.priority)
        most = model.max_model_len - len(prompt_token_ids)
        usual = max(self.sampling_defaults.max_tokens or most, params.min_tokens)
        ends = () if params.ignore_eos else self.tokenizer.eos_token_ids
        return Request(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=replace(
                params,
                max_tokens=min(params.max_tokens or usual, most),
                seed=secrets.randbits(63) if params.seed is None else params.seed,
            ),
            stop_token_ids=list(dict.fromkeys((*ends, *params.stop_token_ids))),
            cache_salt=request.tenant_salt,
            priority=request.priority,
            tenant=request.tenant,
            session=request.tenant_session,
            sibling_of=request.sibling_of,
            adapter=adapter,
            embeds=request.prompt.embeds if isinstance(request.prompt, MixedPrompt) else [],
            trace=request.trace,
        )


def open_model_text(files: ModelFiles, options: ModelOptions) -> ModelText:
    """Read the model's tokenizer and chat template. It takes a while, and may run in a thread."""
    assets = text_assets(files)
    tokenizer = Tokenizer.from_assets(assets)
    template = ChatTemplate.from_assets(assets, tokenizer) if assets.chat_template else None
    return ModelText(tokenizer, template, _styles_of(options, template), _sampling_of(options, files, assets))


def check_prompt(model: ModelInfo, prompt_token_ids: list[int], params: SamplingParams) -> None:
    """Raise InvalidRequest for a prompt that this model cannot answer with these parameters."""
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if length >= model.max_model_len:
        raise ContextTooLong(
            f"The prompt has {length} tokens; this model's context is {model.max_model_len} tokens, "
            "and at least one is needed for the answer.",
            hint="Shorten the prompt, or serve with a larger --max-model-len.",
            param="prompt",
        )
    if params.max_tokens is not None and length + params.max_tokens > model.max_model_len:
        raise ContextTooLong(
            f"The prompt has {length} tokens and max_tokens is {params.max_tokens}; together they exceed "
            f"this model's context of {model.max_model_len} tokens.",
            hint=f"Ask for {model.max_model_len - length} tokens or fewer.",
            param="max_tokens",
        )
    check_token_ids(prompt_token_ids, model.logits_width, "prompt")
    if params.min_tokens > model.max_model_len - length:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}; the context has room for {model.max_model_len - length} more.",
            param="min_tokens",
        )


def _sampling_of(options: ModelOptions, files: ModelFiles, assets: TextAssets) -> SamplingDefaults:
    """Return the defaults that the model's files recommend. Raises ModelError for such as no request could have."""
    if options.generation_config != "auto":
        return SamplingDefaults()
    given = {**files.sampling, **assets.sampling}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    try:
        defaults = msgspec.convert(given, SamplingDefaults)
        replace(defaults.params(), max_tokens=defaults.max_tokens).check()
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ModelError(
            f"{files.path}: the sampling parameters that the model recommends cannot be used: {error}",
            hint="--generation-config none serves it with neutral ones.",
        ) from error
    return defaults


def _styles_of(options: ModelOptions, template: ChatTemplate | None) -> ChatStyles:
    source = template.source if template is not None else None
    is_told = template is not None and not template.knows_tools
    tools, reasoning = options.tool_style, options.reasoning_style
    return ChatStyles(
        tool_style((TOLD_STYLE if is_told else None) if tools == "auto" else tools, source),
        reasoning_style(None if reasoning == "auto" else reasoning, source),
        source or "",
        frozenset() if template is None else template.declared,
    )
