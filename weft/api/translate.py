"""A parsed body becomes requests to the engine here: prompts as the engine takes them, and sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft.api.body import off_loop
from weft.api.openai.logprobs import FIGURE_BYTES
from weft.api.openai.openai_schema import (
    AllowedChoice,
    ChatRequest,
    CompletionRequest,
    EmbedsPart,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    PastCall,
    PredictedContent,
    PromptInput,
    SamplingFields,
    StructuredOutputs,
    Tool,
    ToolChoice,
    tensor_fields,
)
from weft.backends.contract import (
    ENCODED_CONTEXTS,
    ChatStyles,
    Engine,
    max_encoded_tokens,
    not_taken,
    num_tokens,
    text_prompt,
    tokens_of,
    tokens_unknown,
)
from weft.errors import ContextTooLong, InvalidRequest
from weft.payloads import PromptEmbeds, not_with_embeds
from weft.serving.output_reader import ReaderOptions
from weft.serving.request import (
    FieldReport,
    MarkedTensors,
    NamedEmbeds,
    PromptPart,
    check_embeds_taken,
    mixed_prompt,
    requests_like,
)
from weft.serving.served_model import ServedModel
from weft.text.grammars.specs import (
    ChoiceSpec,
    GrammarSpec,
    JsonObjectSpec,
    JsonSchemaSpec,
    LarkSpec,
    RegexSpec,
    ToolCallsSpec,
    ToolSpec,
    too_large,
)
from weft.text.parsers.calls import INPUT
from weft.text.parsers.reasoning import ReasoningStyle, opens_reasoning
from weft.text.parsers.styles import ToolStyle
from weft.types import Conversation, GenerationRequest, Prompt, Sample, SamplingParams, check_token_ids


class Toolbox(Struct, frozen=True):
    offered: list[Function] = []
    """The tools that the model is told of."""
    custom: frozenset[str] = frozenset()
    """The names of those of them that are custom tools."""
    style: ToolStyle | None = None
    """None: no calls are looked for."""
    callable: list[Function] = []
    """Those of them that may be called."""
    must_call: bool = False
    """One of them must be called."""
    is_named: bool = False
    """The request named the one that must be called."""


def toolbox(request: ChatRequest, styles: ChatStyles, *, is_read: bool = False) -> Toolbox:
    """Return the tools of a request. `is_read`: the engine finds the calls itself, and no style is needed."""
    tools, choice = _asked_tools(request)
    functions = [offered(tool) for tool in tools]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("Two tools have the same name.", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, and there are no tools.", param="tool_choice")
        return Toolbox()
    if choice == "none":
        return Toolbox()
    if styles.tools is None and not is_read:
        raise InvalidRequest(
            "It is not known how this model writes tool calls.",
            hint="The operator can say it with --tool-style.",
            param="tools",
        )
    match choice:
        case NamedTool():
            chosen, must_call = {_name(choice)}, True
        case AllowedChoice(allowed_tools=allowed):
            chosen, must_call = {_name(tool) for tool in allowed.tools}, allowed.mode == "required"
        case _:
            chosen, must_call = set(names), choice == "required"
    if unknown := sorted(chosen.difference(names)):
        raise InvalidRequest(f"There is no tool {unknown[0]!r:.100}.", param="tool_choice")
    return Toolbox(
        offered=functions,
        custom=frozenset(name for name, tool in zip(names, tools, strict=True) if tool.type == "custom"),
        style=styles.tools,
        callable=[function for function in functions if function.name in chosen],
        must_call=must_call,
        is_named=isinstance(choice, NamedTool),
    )


def offered(tool: Tool) -> Function:
    """Return the function that the model is told of. That of a custom tool has the text for its one parameter."""
    if tool.type == "function":
        assert tool.function is not None
        return tool.function
    assert tool.custom is not None
    custom, text = tool.custom, {"type": "string"}
    described = [custom.description] if custom.description else []
    if custom.format is not None and custom.format.type == "grammar":
        grammar = custom.format.grammar
        assert grammar is not None
        described.append(f"{INPUT} has the form of this {GRAMMARS[grammar.syntax]}:\n{grammar.definition}")
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    about = "\n\n".join(described) or None
    return Function(name=custom.name, description=about, parameters=schema, strict="pattern" in text or None)


GRAMMARS = {"lark": "Lark grammar", "regex": "regular expression"}


def _name(tool: NamedTool) -> str:
    named = tool.custom if tool.type == "custom" else tool.function
    assert named is not None
    return named.name


def _check_formats(request: ChatRequest, tools: Toolbox, report: FieldReport) -> None:
    """Take note of the grammars of custom tools of which the model is only told: no other is enforced inside of a JSON
    string than a regular expression."""
    for tool in request.tools if tools.offered else ():
        form = tool.custom.format if tool.custom is not None else None
        if form is not None and form.grammar is not None and (form.grammar.syntax == "lark" or tools.style is None):
            report.ignore("chat", "tools.custom.format", "the model is told of the grammar, which is not enforced")


def _asked_tools(request: ChatRequest) -> tuple[list[Tool], ToolChoice | None]:
    """Return the tools of a request and its choice of them, also where it has them in the older form."""
    if request.tools and request.functions:
        raise InvalidRequest("functions is the older form of tools; there may be one of them.", param="functions")
    tools = [Tool(type="function", function=function) for function in request.functions]
    call = request.function_call
    choice = NamedTool(type="function", function=call) if isinstance(call, NamedFunction) else call
    return tools or request.tools, request.tool_choice if choice is None else choice


def _is_parallel(request: ChatRequest) -> bool:
    """Return whether there may be several calls; the older form has a place for one."""
    return request.parallel_tool_calls and not request.functions


def structured_shape(request: SamplingFields, max_schema_kb: int) -> GrammarSpec | None:
    given = request.structured_outputs or StructuredOutputs.model_construct()
    shapes: dict[str, GrammarSpec] = {}
    for param, schema in _under_any_name(
        {
            "structured_outputs.json": given.json_,
            "guided_json": request.guided_json,
            "json_schema": request.json_schema,
        }
    ):
        shapes[param] = JsonSchemaSpec(schema=_schema(schema, max_schema_kb, param), param=param)
    for param, pattern in _under_any_name(
        {"structured_outputs.regex": given.regex, "guided_regex": request.guided_regex}
    ):
        shapes[param] = RegexSpec(pattern=pattern, param=param)
    for param, options in _under_any_name(
        {"structured_outputs.choice": given.choice, "guided_choice": request.guided_choice}
    ):
        shapes[param] = ChoiceSpec(options=options, param=param)
    for param, text in _under_any_name(
        {
            "structured_outputs.grammar": given.grammar,
            "guided_grammar": request.guided_grammar,
            "grammar": request.grammar or None,
        }
    ):
        shapes[param] = LarkSpec(text=text, param=param)
    if given.json_object:
        shapes["structured_outputs"] = JsonObjectSpec(param="structured_outputs")
    return _only(shapes.values())


def _under_any_name(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a field; a value that clients send under several names, for any server, counts
    once."""
    before: list[Any] = []
    for name, value in values.items():
        if value is not None and value not in before:
            before.append(value)
            yield name, value


def _only(shapes: Collection[GrammarSpec]) -> GrammarSpec | None:
    """Return the one shape that there is. Raises InvalidRequest for more."""
    if len(shapes) > 1:
        first, second, *_ = shapes
        raise InvalidRequest(f"{first.param} and {second.param} both say what to write.", param=first.param)
    return next(iter(shapes), None)


def chat_shape(request: ChatRequest, tools: Toolbox, max_schema_kb: int) -> GrammarSpec | None:
    """Return what the answer must be. The format of a text leaves calls as they are, where the style is known."""
    either = (_response_format(request), structured_shape(request, max_schema_kb))
    asked = _only([shape for shape in either if shape is not None])
    if tools.style is None:
        # An engine that reads calls itself is told of tool_choice.
        return None if tools.must_call else asked
    is_limited = len(tools.callable) < len(tools.offered) or any(function.strict for function in tools.offered)
    return _calls(request, tools, asked) if tools.must_call or asked or is_limited else None


def _response_format(request: ChatRequest) -> GrammarSpec | None:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None
    for name, schema in (("schema", asked.schema_), ("value", asked.value)):
        if schema is not None:
            return JsonSchemaSpec(schema=schema, param=f"response_format.{name}")
    if asked.json_schema is None:
        return JsonObjectSpec(param="response_format")
    return JsonSchemaSpec(schema=asked.json_schema.schema_, param="response_format.json_schema.schema")


def _calls(request: ChatRequest, tools: Toolbox, text: GrammarSpec | None) -> ToolCallsSpec:
    """Return the shape of calls. Arguments fit the schema where a call is forced, or where its tool says so."""
    assert tools.style is not None and not isinstance(text, ToolCallsSpec)
    return ToolCallsSpec(
        shape=tools.style.shape,
        tools=[
            ToolSpec(
                name=function.name,
                parameters=function.parameters if tools.must_call or function.strict else {"type": "object"},
            )
            for function in tools.callable
        ],
        at_least_one=tools.must_call,
        parallel=_is_parallel(request) and not tools.is_named,
        text=None if tools.must_call else text,
        param="tools" if tools.must_call or text is None else text.param,
    )


def _schema(given: dict[str, Any] | str, max_kb: int, param: str) -> dict[str, Any]:
    """Return the schema, which some clients send as JSON text."""
    if isinstance(given, str) and len(given) > max_kb * 1024:
        raise too_large(param, max_kb)
    try:
        schema = msgspec.json.decode(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InvalidRequest(f"The schema is not valid JSON: {error}.", param=param) from error
    if not isinstance(schema, dict):
        raise InvalidRequest("The schema must be a JSON object.", param=param)
    return schema


LONG_PROMPT = 2000
"""Characters, or token ids. Above this prompts are encoded in a thread: the streams of others go on meanwhile."""


class ParsedRequest(Struct, frozen=True, kw_only=True):
    """The requests to the engine that a chat or a completion becomes, and what their writer must know of them."""

    requests: list[GenerationRequest]
    n: int = 1
    """Choices of each prompt, which follow one another."""
    reader_options: ReaderOptions = ReaderOptions()
    truncated_tokens: int = 0
    """Tokens that were cut from the prompts' beginnings, because the request allowed it."""

    @property
    def prompt(self) -> Prompt:
        return self.requests[0].prompt

    @property
    def params(self) -> SamplingParams:
        task = self.requests[0].task
        assert isinstance(task, Sample)
        return task.params


async def parse_chat(
    request: ChatRequest, served: ServedModel, report: FieldReport, *, request_id: str = "", tenant: str = ""
) -> ParsedRequest:
    """Turn a chat into requests to the engine, whose ids begin with `request_id`. The report tells what of it cannot be
    done."""
    engine = served.engine
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    prediction = request.prediction
    if prediction is not None and not engine.abilities.prediction:
        report.ignore("chat", "prediction", f"the engine {engine.name} drafts no tokens from it")
        prediction = None
    _check_continued(request)
    _check_tokens(request, engine)
    tools = toolbox(request, engine.text.styles, is_read=not engine.abilities.tokens)
    _check_formats(request, tools, report)
    variables = _template_variables(request, engine.text.styles, report)
    prompt: Prompt
    if (field := _embeds_field(request)) is not None:
        _check_embeds(request, served, field)
    if engine.abilities.tokens:
        # The template is rendered by another process, and its answer waited for.
        text, prompt = await asyncio.to_thread(_chat_prompt, request, tools, variables, engine)
        reader_options = _reader_options(request, tools, text, engine.text.styles.reasoning)
    else:
        prompt, reader_options = _conversation(request, tools, variables), _reader_options(request, tools)
    shape = chat_shape(request, tools, served.options.max_schema_kb)
    params = _params(
        request,
        max_tokens=_chat_max_tokens(request),
        logprobs=request.top_logprobs or 0 if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        grammar=await served.grammar_of(shape, reader_options.thinking),
        engine=engine,
    )
    if prediction is not None:
        params = replace(params, prediction=await asyncio.to_thread(_predicted, prediction, engine))
    prompts, truncated = _truncated([prompt], request, params, engine)
    task = Sample(params=params, markers=reader_options.markers, call_marker=reader_options.call_marker)
    requests = _requests(request, prompts, task, served, report, n=request.n, request_id=request_id, tenant=tenant)
    return ParsedRequest(requests=requests, n=request.n, reader_options=reader_options, truncated_tokens=truncated)


async def parse_completion(
    request: CompletionRequest,
    served: ServedModel,
    report: FieldReport,
    *,
    request_id: str = "",
    tenant: str = "",
    to_the_end: bool = False,
) -> ParsedRequest:
    """Turn a completion into requests to the engine, whose ids begin with `request_id`. The report tells what of it
    cannot be done. `to_the_end`: the answer may fill the context, whatever max_tokens says."""
    engine = served.engine
    made = _num_made(request, engine)
    _check_suffix(request, engine)
    _check_tokens(request, engine)
    grammar = await served.grammar_of(structured_shape(request, served.options.max_schema_kb))
    params = _params(
        request,
        # Nothing behind the prompt is wanted: the one token that the engine must make is not shown.
        max_tokens=None if to_the_end else 1 if request.echo and request.max_tokens == 0 else request.max_tokens,
        # The best answers are found by their figures.
        logprobs=0 if request.logprobs is None and made > request.n else request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        grammar=grammar,
        engine=engine,
    )
    field = "prompt_embeds" if request.prompt_embeds else "prompt"
    has_embeds = bool(request.prompt_embeds) or any(isinstance(one, tuple) for one in request.prompt)
    if has_embeds:
        _check_embeds(request, served, field)
    is_long = has_embeds or sum(map(len, request.prompt)) + len(request.suffix) > LONG_PROMPT
    given = await off_loop(is_long, _prompts, request, engine)
    if not all(given):
        raise InvalidRequest("An empty prompt gives the model nothing to go on.", param="prompt")
    prompts, truncated = _truncated(given, request, params, engine)
    task = Sample(params=params)
    requests = _requests(request, prompts, task, served, report, n=made, request_id=request_id, tenant=tenant)
    return ParsedRequest(requests=requests, n=made, truncated_tokens=truncated)


def _num_made(request: CompletionRequest, engine: Engine) -> int:
    """Return how many answers are made to each prompt, of which n are given."""
    made = request.n if request.best_of is None else request.best_of
    if made < request.n:
        raise InvalidRequest(f"best_of is {made}; it must be at least n, which is {request.n}.", param="best_of")
    if made > request.n and request.stream:
        raise InvalidRequest(
            "The best answers are known when all have ended: they cannot be streamed.", param="best_of"
        )
    if made > request.n and not engine.abilities.logprobs:
        raise not_taken(engine.name, "best_of")
    return made


def _check_suffix(request: CompletionRequest, engine: Engine) -> None:
    """Raise InvalidRequest for a suffix that the model, or another field, cannot go with."""
    if not request.suffix:
        return
    if not engine.abilities.tokens:
        raise tokens_unknown(engine, "suffix", "suffix")
    if engine.text.tokenizer.fill_in_middle is None:
        raise InvalidRequest("This model has no tokens to fill in the middle of a text.", param="suffix")
    if request.echo or request.prompt_embeds or any(isinstance(one, tuple) for one in request.prompt):
        raise InvalidRequest("suffix cannot go with echo and with prompt embeds.", param="suffix")


def template_message(message: Message, content: str | None = None) -> dict[str, Any]:
    """Return a message as chat templates read it: the arguments of calls are no JSON text but what it says. `content`
    takes the place of the message's own."""
    fields = passed_message(message, content)
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


_ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates, and many a server, know by other names."""


def passed_message(message: Message, content: str | None = None) -> dict[str, Any]:
    text = message.content if content is None else content
    if isinstance(text, list):
        raise InvalidRequest("Prompt embeds are not text, and have no tokens.", param="messages")
    fields: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role),
        "content": text or "",
    }
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning
    old = [PastCall(function=message.function_call)] if message.function_call else []
    if calls := message.tool_calls or old:
        fields["tool_calls"] = [{"type": "function", "id": call.id, "function": _called(call)} for call in calls]
    return fields


def _called(call: PastCall) -> dict[str, str]:
    """Return the function that a past call was of, for the model."""
    if call.type == "custom":
        assert call.custom is not None
        return {"name": call.custom.name, "arguments": msgspec.json.encode({INPUT: call.custom.input}).decode()}
    assert call.function is not None
    return {"name": call.function.name, "arguments": call.function.arguments}


def template_tools(tools: Iterable[Function]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function.model_dump(exclude_none=True)} for function in tools]


def _arguments(text: str) -> Any:
    """Decode arguments, which templates write as JSON themselves; what is no JSON object is left as it is."""
    try:
        value = msgspec.json.decode(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _check_tokens(request: SamplingFields, engine: Engine) -> None:
    """Raise InvalidRequest for a field that needs tokens which are not known."""
    asked = {
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
        "echo": isinstance(request, CompletionRequest) and request.echo,
    }
    for field, is_asked in asked.items():
        if is_asked and not engine.abilities.tokens:
            raise tokens_unknown(engine, field, field)
    if request.return_token_ids and not engine.abilities.answer_tokens:
        field = "return_token_ids"
        helps = "answer_tokens" in engine.abilities.with_tokenizer
        raise tokens_unknown(engine, field, field) if helps else not_taken(engine.name, field)


def _embeds_field(request: ChatRequest) -> str | None:
    """Return the place of the first prompt embeds in a chat; None: it has none."""
    for number, message in enumerate(request.messages):
        if isinstance(message.content, list):
            place = next(at for at, part in enumerate(message.content) if isinstance(part, EmbedsPart))
            return f"messages[{number}].content[{place}]"
    return None


def _check_embeds(request: SamplingFields, served: ServedModel, field: str) -> None:
    """Raise InvalidRequest for prompt embeds that are not taken here, and for a field that cannot go with them."""
    check_embeds_taken(served.engine, served.limits, field)
    asked = {
        "prompt_logprobs": request.prompt_logprobs is not None,
        "return_token_ids": request.return_token_ids,
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
        "echo": isinstance(request, CompletionRequest) and request.echo,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise not_with_embeds(name)


def _check_continued(request: ChatRequest) -> None:
    continues = request.continue_final_message
    if continues and request.messages[-1].role != "assistant":
        raise InvalidRequest("Only an assistant's message can be continued.", param="continue_final_message")
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt begins a new message; continue_final_message goes on with the last.",
            param="add_generation_prompt",
        )


def _begins_answer(request: ChatRequest) -> bool:
    asked = request.add_generation_prompt
    return not request.continue_final_message if asked is None else asked


def _template_variables(request: ChatRequest, styles: ChatStyles, report: FieldReport) -> dict[str, Any]:
    """Return the variables of the chat template: the request's own, and how much the model is to think as far as the
    template reads it."""
    effort, thinks = request.reasoning_effort, request.enable_thinking
    if thinks is None and effort is not None:
        thinks = effort != "none"
    asked = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    variables = {name: value for name, value in asked.items() if value is not None and name in styles.variables}
    # A model that does not think need not be told to leave it.
    is_wanted = thinks or (thinks is False and styles.reasoning is not None)
    if is_wanted and not variables:
        field = "enable_thinking" if effort is None else "reasoning_effort"
        report.ignore("chat", field, "the model's chat template does not read it")
    return variables | request.chat_template_kwargs


def _chat_prompt(request: ChatRequest, tools: Toolbox, variables: dict[str, Any], engine: Engine) -> tuple[str, Prompt]:
    """Return a chat as the model's template writes it, and the prompt that this is."""
    tensors = MarkedTensors()
    messages = [
        template_message(message, _marked(message, f"messages[{number}].content", tensors))
        for number, message in enumerate(request.messages)
    ]
    chat = engine.text.encode_chat(
        messages,
        tools=template_tools(tools.offered) or None,
        add_generation_prompt=_begins_answer(request),
        continue_final_message=request.continue_final_message,
        template_variables=variables,
        max_tokens=max_encoded_tokens(engine),
    )
    return chat.text, tensors.prompt_of(chat.text, engine) if tensors else chat.token_ids


def _predicted(prediction: PredictedContent, engine: Engine) -> tuple[int, ...]:
    """Return the tokens of a predicted text, no more than the context holds."""
    most = max_encoded_tokens(engine)
    try:
        token_ids = engine.text.tokenizer.encode(prediction.content, add_special_tokens=False, max_tokens=most)
    except ContextTooLong as error:
        raise ContextTooLong(error.message, hint="Shorten it.", param="prediction") from error
    return tuple(token_ids[: engine.model.max_model_len])


def _marked(message: Message, field: str, tensors: MarkedTensors) -> str | None:
    """Return the content of a message with a mark for each of its prompt embeds; None: it has none."""
    if not isinstance(message.content, list):
        return None
    written, after_text = "", False
    for place, part in enumerate(message.content):
        if isinstance(part, str):
            written += f"\n{part}" if after_text else part
        else:
            written += tensors.mark(*_named_embeds(part, f"{field}[{place}]"))
        after_text = isinstance(part, str)
    return written


def _conversation(request: ChatRequest, tools: Toolbox, variables: dict[str, Any]) -> Conversation:
    _, choice = _asked_tools(request)
    if isinstance(choice, AllowedChoice):
        choice = choice.allowed_tools.mode
    return Conversation(
        messages=[passed_message(message) for message in request.messages],
        tools=template_tools(tools.callable),
        tool_choice={"type": "function", "function": {"name": _name(choice)}}
        if isinstance(choice, NamedTool)
        else choice,
        parallel_tool_calls=_is_parallel(request),
        add_generation_prompt=_begins_answer(request),
        continue_final_message=request.continue_final_message,
        template_variables=variables,
    )


def _reader_options(
    request: ChatRequest, tools: Toolbox, prompt_text: str | None = None, reasoning: ReasoningStyle | None = None
) -> ReaderOptions:
    """Return how the answer is read. Without the prompt's text: the engine that renders it reads the answer too."""
    return ReaderOptions(
        tools=tools.style,
        declared=tuple(function.name for function in tools.callable),
        custom=tools.custom,
        most_calls=None if _is_parallel(request) else 1,
        reasoning=reasoning,
        reasoning_opened=reasoning is not None and opens_reasoning(reasoning, (prompt_text or "")[-100:]),
        with_reasoning=request.include_reasoning,
        is_read=prompt_text is None,
        is_forced_call=tools.must_call and prompt_text is not None,
        is_named_call=tools.is_named,
    )


def _prompts(request: CompletionRequest, engine: Engine) -> list[Prompt]:
    """Return the prompts of a completion: first those that are prompt embeds, as vLLM has it."""
    rows: list[Prompt] = [
        mixed_prompt([_named_embeds(embeds, f"prompt_embeds[{number}]")], engine)
        for number, embeds in enumerate(request.prompt_embeds)
    ]
    if rows and request.prompt == [""]:
        return rows
    if request.suffix:
        return [_prompt_before(given, request.suffix, engine) for given in request.prompt]
    several = len(request.prompt) > 1
    return rows + [
        _prompt(given, f"prompt[{number}]" if several else "prompt", engine)
        for number, given in enumerate(request.prompt)
    ]


def _prompt_before(given: PromptInput, suffix: str, engine: Engine) -> list[int]:
    """Return the prompt of the text between a prompt and a suffix."""
    tokenizer, most = engine.text.tokenizer, max_encoded_tokens(engine)
    assert tokenizer.fill_in_middle is not None and not isinstance(given, tuple), "it was checked"
    behind = tokenizer.encode(suffix, add_special_tokens=False, max_tokens=most)
    if isinstance(given, str):
        before = tokenizer.encode(given, add_special_tokens=False, max_tokens=most)
    else:
        before = given_tokens(given, engine, "prompt")
    return tokenizer.fill_in_middle.prompt(before, behind)


def _named_embeds(part: EmbedsPart, field: str) -> NamedEmbeds:
    return field, PromptEmbeds(**tensor_fields(part, field))


def _prompt(given: PromptInput, field: str, engine: Engine) -> Prompt:
    match given:
        case str():
            return text_prompt(engine, given)
        case list():
            return given_tokens(given, engine, "prompt")
    parts: list[PromptPart] = []
    at = 0
    for part in given:
        if isinstance(part, list):
            parts.append(given_tokens(part, engine, "prompt"))
            at += len(part)
        else:
            parts.append(_named_embeds(part, f"{field}[{at}]"))
            at += 1
    return mixed_prompt(parts, engine)


def given_tokens(token_ids: list[int], engine: Engine, param: str) -> list[int]:
    """Return token ids of a client, where the engine can take them."""
    if not engine.abilities.tokens:
        raise tokens_unknown(engine, "Token ids instead of text", param)
    if len(token_ids) > (most := max_encoded_tokens(engine)):
        raise ContextTooLong(
            f"{param} has {len(token_ids)} token ids; at most {most} are taken, {ENCODED_CONTEXTS} times the context.",
            hint="Shorten it, or serve with a larger --max-model-len.",
            param=param,
        )
    check_token_ids(token_ids, engine.model.logits_width, param)
    return token_ids


def _truncated(
    prompts: Sequence[Prompt], request: SamplingFields, params: SamplingParams, engine: Engine
) -> tuple[Sequence[Prompt], int]:
    """Return the prompts within the length that the request allows, and how many tokens were cut off in all."""
    longest = request.truncate_prompt_tokens
    if longest is None:
        return prompts, 0
    capacity = engine.model.max_model_len - (params.max_tokens or 1)
    if longest == -1:
        longest = capacity
    if not 1 <= longest <= engine.model.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {request.truncate_prompt_tokens}; it must be -1, or from 1 to "
            f"{engine.model.max_model_len}.",
            param="truncate_prompt_tokens",
        )
    whole = [tokens_of(prompt) for prompt in prompts]
    kept = [prompt[-longest:] for prompt in whole]
    return kept, sum(map(len, whole)) - sum(map(len, kept))


def _requests(
    request: SamplingFields,
    prompts: Sequence[Prompt],
    task: Sample,
    served: ServedModel,
    report: FieldReport,
    *,
    n: int,
    request_id: str,
    tenant: str,
) -> list[GenerationRequest]:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; it must be at least 1.", param="n")
    num_choices, most = len(prompts) * n, max(served.limits.max_n, served.limits.max_prompts)
    if num_choices > most:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {n} are {num_choices} answers; at most {most} in one request.",
            hint="The operator's settings are --max-n and --max-prompts.",
            param="n",
        )
    _check_answer_size(request, n, prompts, task.params, served)
    common = GenerationRequest(
        prompt=prompts[0],
        task=task,
        request_id=request_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=tenant,
        session=request.prompt_cache_key or "",
        adapter=served.adapter_for(request.model, request.adapter),
    )
    return [within_context(one, task.params, served, report) for one in requests_like(common, prompts, n)]


def within_context(
    request: GenerationRequest, params: SamplingParams, served: ServedModel, report: FieldReport
) -> GenerationRequest:
    """Cut max_tokens to what the context holds behind the prompt, unless fields are strict: then the engine refuses."""
    context = served.engine.model.max_model_len
    room = context - num_tokens(request.prompt)
    assert isinstance(request.task, Sample)
    if not context or room < 1 or (params.max_tokens or 0) <= room or report.mode == "strict":
        return request
    report.leave_aside("chat.max_tokens")
    return replace(request, task=replace(request.task, params=replace(request.task.params, max_tokens=room)))


def _check_answer_size(
    request: SamplingFields, n: int, prompts: Sequence[Prompt], params: SamplingParams, served: ServedModel
) -> None:
    """Raise InvalidRequest for an answer with more log probabilities than there is memory for."""
    context, lengths = served.engine.model.max_model_len, [num_tokens(prompt) for prompt in prompts]
    figures = 0
    if params.prompt_logprobs is not None:
        # A chat's choices have one prompt, whose figures are told once; a completion's choices each tell them.
        told = n if isinstance(request, CompletionRequest) else 1
        figures += told * (params.prompt_logprobs + 1) * sum(lengths)
    if params.logprobs is not None:
        longest = (max(0, context - length) for length in lengths)
        tokens = sum(min(params.max_tokens or most, most) for most in longest)
        figures += n * (params.logprobs + 1) * tokens
    limit = served.limits.max_answer_mb
    if (size := figures * FIGURE_BYTES) > limit << 20:
        raise InvalidRequest(
            f"The answer may have {figures} log probabilities, which take {size >> 20} MiB; at most {limit} MiB are "
            "taken.",
            hint="Ask for a smaller n, max_tokens, logprobs or prompt_logprobs, or send fewer prompts. The operator's "
            "setting is --max-answer-mb.",
            param="logprobs" if params.prompt_logprobs is None else "prompt_logprobs",
        )


def _params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str,
    engine: Engine,
) -> SamplingParams:
    usual = engine.text.sampling_defaults
    top_k = usual.top_k if request.top_k is None else request.top_k
    params = SamplingParams(
        temperature=usual.temperature if request.temperature is None else request.temperature,
        top_p=usual.top_p if request.top_p is None else request.top_p,
        top_k=0 if top_k == -1 else top_k,
        min_p=usual.min_p if request.min_p is None else request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=(
            usual.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
        ),
        logit_bias={_token_id(key): bias for key, bias in request.logit_bias.items()},
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        speculative=request.speculative,
    )
    params.check()
    if engine.abilities.tokens:
        params.check_token_ids(engine.model.logits_width)
    return params


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return how many logprobs of the prompt are wanted; an echoed prompt has them whenever the answer has."""
    echoed = request.logprobs if request.echo else None
    asked = request.prompt_logprobs
    return max(echoed, asked) if echoed is not None and asked is not None else echoed if asked is None else asked


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same.", param="max_tokens"
        )
    return old if new is None else new


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise InvalidRequest(f"logit_bias has the key {key!r:.40}; keys are token ids.", param="logit_bias")
    return int(key)
