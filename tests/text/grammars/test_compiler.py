"""From what a request asks to a grammar: what each kind lets through, and what is refused, with which words."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from tests.growth import check_linear
from tests.text.grammars.grammar_maker import grammars
from tests.tiny_models import END_OF_TURN, tokenizer_json
from tests.waiting import PATIENCE, until
from weft.api.openai.openai_schema import Tool
from weft.api.translate import offered
from weft.errors import InvalidRequest, Overloaded
from weft.options import ServerOptions
from weft.text.grammars import compiler as compiler_module
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.json_schema import check_schema
from weft.text.grammars.lark import GrammarWriter
from weft.text.grammars.specs import (
    ChoiceSpec,
    GrammarSpec,
    GrammarVocabulary,
    JsonObjectSpec,
    JsonSchemaSpec,
    LarkSpec,
    RegexSpec,
    ThinkingSpec,
    ToolCallsSpec,
    ToolSpec,
    vocabulary_of,
)
from weft.text.parsers.pieces import collect
from weft.text.parsers.styles import TOOL_STYLES, ToolStyle, parser_for
from weft.text.tokenizer import Tokenizer
from weft.types import MAX_GRAMMAR_CHARS, TextAssets
from weft.worker.grammar_masks import MatcherFactory

MARKERS = sorted({marker for style in TOOL_STYLES for marker in style.markers})
WEATHER = ToolSpec(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TOOLS = [ToolSpec(name="get"), WEATHER]
WEATHER_CALL = ("get_weather", '{"city": "Paris", "days": 3}')
STYLES = pytest.mark.parametrize("style", TOOL_STYLES, ids=lambda style: style.name)


def tokenizer_with(special: list[str]) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    inner.add_special_tokens(special)
    return Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=inner.to_str(), eos_token_ids=[END_OF_TURN, 0]))


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return tokenizer_with([])


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """Markers of tool calls are special tokens."""
    return tokenizer_with(MARKERS)


class Judge:
    """What the engine would say of outputs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: GrammarSpec,
        thinking: ThinkingSpec | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        words = vocabulary_of(tokenizer)
        self._of_byte = {token[0]: i for i, token in enumerate(words.tokens) if len(token) == 1}
        made = MatcherFactory(words.tokens, words.special_ids, words.eos_token_ids, tokenizer.vocab_size)
        self._built = made.build(grammars(tokenizer, [spec], options, thinking)[0])

    def fits(self, output: str | list[int]) -> bool:
        ids = self.spelled(output) if isinstance(output, str) else output
        matcher = self._built.result().deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def spelled(self, text: str) -> list[int]:
        """A token for each byte."""
        return [self._of_byte[byte] for byte in text.encode()]


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (
            JsonObjectSpec(),
            ['{"a": [1, null], "b": 2}', "{}"],
            [
                "[1]",
                '"a"',
                "{} ",
                "{a: 1}",
                '{"a":1}',
                '{\n"a": 1}',
                '{ "a": 1}',
                '{"a" : 1}',
                '{"a":  1}',
                '{"a": [1,  2]}',
            ],
        ),
        (RegexSpec(pattern="[0-9]{3}-[a-z]+"), ["123-abc"], ["123-", "x123-abc"]),
        (RegexSpec(pattern="^a/b$"), ["a/b"], ["a/bc", "^a/b$"]),
        (RegexSpec(pattern='"\\d+"\n?'), ['"12"', '"1"\n'], ['""']),
        (
            ChoiceSpec(options=["yes", "yes, but", 'q"\\\n', "世\x7f"]),
            ["yes", "yes, but", 'q"\\\n', "世\x7f"],
            ["y", "no"],
        ),
        (
            LarkSpec(text='start: greeting NAME\ngreeting: "hello " | "hi "\nNAME: /[A-Z][a-z]*/'),
            ["hi Ann"],
            ["hi ann"],
        ),
    ],
    ids=["object", "regex", "slashes", "quotes", "choice", "lark"],
)
def test_what_each_kind_lets_through(plain: Tokenizer, spec: GrammarSpec, good: list[str], bad: list[str]) -> None:
    judge = Judge(plain, spec)
    assert [text for text in good if not judge.fits(text)] == []
    assert [text for text in bad if judge.fits(text)] == []


def test_blanks_between_the_parts_of_json_come_to_an_end_where_they_may_be_indented(plain: Tokenizer) -> None:
    judge = Judge(plain, JsonObjectSpec(), options=ServerOptions(json_whitespace="indented"))
    assert judge.fits('{\n  "a": [1, 2]\n}')
    assert not judge.fits('{"a":' + "\n" * 3 + "1}") and not judge.fits('{"a":' + "  " + "1}")
    assert not judge.fits("{\n" + " " * 65 + "}") and judge.fits("{\n" + " " * 64 + "}")


THOUGHTS = ThinkingSpec(begin="<think>", end="</think>", is_open=False)


@pytest.mark.parametrize(
    ("spec", "good"),
    [
        (JsonObjectSpec(), '{"a": 1}'),
        (ChoiceSpec(options=["yes", "no"]), "yes"),
        (RegexSpec(pattern="[a-c]+"), "abc"),
        (LarkSpec(text='start: "x" end\nend: "y"'), "xy"),
        (ToolCallsSpec(shape=TOOL_STYLES[0].shape, tools=TOOLS), TOOL_STYLES[0].shape.write([WEATHER_CALL])),
    ],
    ids=["object", "choice", "regex", "lark", "calls"],
)
def test_thoughts_may_come_before_what_is_in_form(plain: Tokenizer, spec: GrammarSpec, good: str) -> None:
    closed = Judge(plain, spec, THOUGHTS)
    fitting = [good, f"<think>hm, {{</think>{good}", f"<think>\nhm\n</think>\n\n{good}"]
    others = [f"hm{good}", f"<think>{good}", f"<think></think>hm{good}", f"{good}<think></think>"]
    assert [text for text in fitting if not closed.fits(text)] == []
    assert [text for text in others if closed.fits(text)] == []
    opened = Judge(plain, spec, replace(THOUGHTS, is_open=True))
    assert opened.fits(f"hm</think>\n{good}") and not opened.fits(good)


def test_thoughts_between_special_tokens() -> None:
    tokenizer = tokenizer_with(["<think>", "</think>"])
    judge = Judge(tokenizer, JsonObjectSpec(), THOUGHTS)
    begin, end = (tokenizer.encode(marker, add_special_tokens=False) for marker in ("<think>", "</think>"))
    assert len(begin) == len(end) == 1
    assert judge.fits([*begin, *judge.spelled("hm"), *end, *judge.spelled("{}")])
    assert not judge.fits([*begin, *judge.spelled("hm{}")])


def test_a_special_token_in_lark_is_that_token(plain: Tokenizer) -> None:
    judge = Judge(plain, LarkSpec(text='start: <|im_start|> "a"'))
    a = judge.spelled("a")
    assert judge.fits([1, *a])
    assert not judge.fits("<|im_start|>a")


# Tool calls.


@STYLES
def test_calls_are_written_in_the_models_style(plain: Tokenizer, style: ToolStyle) -> None:
    judge = Judge(plain, ToolCallsSpec(shape=style.shape, tools=TOOLS))
    write = style.shape.write
    assert judge.fits(write([WEATHER_CALL]))
    assert judge.fits(write([("get", "{}"), WEATHER_CALL, WEATHER_CALL]))
    assert not judge.fits("It is sunny.")
    assert not judge.fits(write([("get_wea", "{}")]))
    assert not judge.fits(write([("get", '{"city": "Paris"}')]))
    assert not judge.fits(write([("get_weather", '{"days": 3}')]))
    assert not judge.fits(write([("get_weather", '{"city": "Paris", "days": "three"}')]))
    assert not judge.fits("Well. " + write([WEATHER_CALL]))


@STYLES
def test_the_text_of_a_custom_tool_matches_its_regular_expression(plain: Tokenizer, style: ToolStyle) -> None:
    grammar = {"syntax": "regex", "definition": 'set "[a-z]+"\\n|get'}
    asked = {"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": grammar}}}
    function = offered(Tool.model_validate(asked))
    spec = ToolCallsSpec(shape=style.shape, tools=[ToolSpec(name="run", parameters=function.parameters)])
    judge = Judge(plain, spec)
    for text, fits in (('set "ab"\n', True), ("get", True), ('set "ab"', False), ("a get", False), ("get b", False)):
        assert judge.fits(style.shape.write([("run", json.dumps({"input": text}))])) is fits


@STYLES
def test_one_call_where_no_more_may_be(plain: Tokenizer, style: ToolStyle) -> None:
    judge = Judge(plain, ToolCallsSpec(shape=style.shape, tools=TOOLS, parallel=False))
    assert judge.fits(style.shape.write([WEATHER_CALL]))
    assert not judge.fits(style.shape.write([WEATHER_CALL, WEATHER_CALL]))


@STYLES
def test_text_with_calls_behind_it_or_none(plain: Tokenizer, style: ToolStyle) -> None:
    judge = Judge(plain, ToolCallsSpec(shape=style.shape, tools=TOOLS, at_least_one=False))
    write = style.shape.write
    assert judge.fits("It is sunny.\nAnd warm.")
    assert judge.fits(write([WEATHER_CALL]))
    assert judge.fits("I shall look. " + write([("get", "{}"), WEATHER_CALL]))
    assert not judge.fits("I shall look. " + write([("get_weather", '{"days": 3}')]))
    assert not judge.fits("I shall look. " + write([("other", "{}")]))


@STYLES
def test_text_of_a_form_or_calls(plain: Tokenizer, style: ToolStyle) -> None:
    form = JsonSchemaSpec(schema={"type": "array", "items": {"type": "integer"}})
    spec = ToolCallsSpec(shape=style.shape, tools=TOOLS, at_least_one=False, text=form)
    for thinking in (None, ThinkingSpec(begin="<think>", end="</think>", is_open=False)):
        judge = Judge(plain, spec, thinking)
        before = "<think>hm</think>" if thinking else ""
        assert judge.fits(before + style.shape.write([WEATHER_CALL]))
        assert judge.fits(before + "[1, 2]")
        assert not judge.fits(before + "It is sunny.")


@STYLES
@pytest.mark.parametrize("at_least_one", [True, False])
def test_markers_are_taken_as_tokens_and_as_text(marked: Tokenizer, style: ToolStyle, at_least_one: bool) -> None:
    judge = Judge(marked, ToolCallsSpec(shape=style.shape, tools=TOOLS, at_least_one=at_least_one))
    text = style.shape.write([WEATHER_CALL, ("get", "{}")])
    as_tokens = marked.encode(text, add_special_tokens=False)
    has_markers = any(marker in text for marker in style.markers)
    assert any(token in marked.special_ids for token in as_tokens) == has_markers
    assert judge.fits(as_tokens)
    assert judge.fits(text)


@STYLES
def test_the_parser_reads_what_the_grammar_writes(plain: Tokenizer, style: ToolStyle) -> None:
    text = style.shape.write([WEATHER_CALL])
    assert Judge(plain, ToolCallsSpec(shape=style.shape, tools=TOOLS)).fits(text)
    parser = parser_for(style, None, declared=["get", "get_weather"])
    answer = collect([*parser.push(text), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [
        (WEATHER_CALL[0], json.loads(WEATHER_CALL[1]))
    ]


# Refusals.


def compiling(
    tokenizer: Tokenizer, work: Callable[[GrammarCompiler], Awaitable[None]], options: ServerOptions | None = None
) -> None:
    async def scenario() -> None:
        compiler = GrammarCompiler(tokenizer, options)
        try:
            await work(compiler)
        finally:
            await compiler.close()

    asyncio.run(scenario())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: dict[str, tuple[GrammarSpec, str]] = {
    "not": (JsonSchemaSpec(schema={"properties": {"a": {"not": {}}}}), r"at /properties/a: not\."),
    "uniqueItems": (JsonSchemaSpec(schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
    "if and then": (JsonSchemaSpec(schema={"items": {"if": {}, "then": {}}}), r"at /items: if, then\."),
    "a word of nobody's": (JsonSchemaSpec(schema={"$defs": {"x": {"nullable": True}}}), r"at /\$defs/x: nullable"),
    "options of the compiler": (JsonSchemaSpec(schema={"x-guidance": {"lenient": True}}), "x-guidance"),
    "a wrong type": (JsonSchemaSpec(schema={"type": "strng"}), "Invalid type: strng"),
    "a format of nobody's": (JsonSchemaSpec(schema={"type": "string", "format": "color"}), "Unknown format: color"),
    "one of what overlaps": (JsonSchemaSpec(schema={"oneOf": [{"maximum": 5}, {"minimum": 3}]}), "oneOf"),
    "a contradiction": (JsonSchemaSpec(schema={"allOf": [{"type": "null"}, {"type": "string"}]}), "incompatible types"),
    "no such definition": (JsonSchemaSpec(schema={"$ref": "#/$defs/x"}), "does not exist"),
    "elsewhere": (JsonSchemaSpec(schema={"$ref": "https://example.com/schema"}), "does not fetch"),
    "only itself": (
        JsonSchemaSpec(schema={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "no text fits",
    ),
    "names that may repeat": (JsonSchemaSpec(schema={"type": "object", "minProperties": 2}), "minProperties 2"),
    "two drafts": (JsonSchemaSpec(schema={"prefixItems": [], "additionalItems": False}), "different drafts"),
    "no number": (JsonSchemaSpec(schema={"minimum": float("nan")}), "not valid JSON"),
    "too deep": (JsonSchemaSpec(schema=nested(33)), "more than 32 levels"),
    "too large": (JsonSchemaSpec(schema={"enum": ["x" * 100 + str(i) for i in range(700)]}), "64 KiB"),
    "a product": (
        JsonSchemaSpec(
            schema={
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": True}, "required": [f"p{i}{j}"]} for j in range(4)]}
                    for i in range(8)
                ]
            }
        ),
        "schema too large",
    ),
    "a regex that looks ahead": (RegexSpec(pattern="a(?=b)"), "look-around"),
    "a regex that looks back": (RegexSpec(pattern=r"(a)\1"), "backreferences"),
    "half a regex": (RegexSpec(pattern="(a"), "unclosed group"),
    "no choice": (ChoiceSpec(options=[]), "nothing to choose from"),
    "a name of nobody's": (LarkSpec(text="start: nobody"), 'unknown name: "nobody"'),
    "half a grammar": (LarkSpec(text='start: "a\n'), "1\\("),
    "half of another notation": (LarkSpec(text='root ::= "a'), "not valid GBNF: Unexpected end"),
    "too much of another notation": (LarkSpec(text='root ::= "a"\n' * 501), "501 rules; at most 500"),
    "a list of grammars": (LarkSpec(text='{"grammars": []}'), "neither in Lark nor in GBNF"),
    "a temperature": (LarkSpec(text="start: x\nx[temperature=0.5]: /a+/"), "temperature"),
    "a stop": (LarkSpec(text='start: x\nx[capture, stop="b"]: /a+/'), "stop"),
    "no tools": (ToolCallsSpec(shape=TOOL_STYLES[0].shape, tools=[]), "no tools"),
    "arguments that are a list": (
        ToolCallsSpec(shape=TOOL_STYLES[0].shape, tools=[ToolSpec(name="f", parameters={"type": "array"})]),
        "'f' are not an object",
    ),
}


def test_refused_with_the_field_and_the_reason(plain: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for name, (spec, reason) in REFUSED.items():
            with pytest.raises(InvalidRequest, match=reason) as refusal:
                await compiler.compile(spec)
            assert refusal.value.param == spec.param, name
            assert "\n" not in refusal.value.message, name

    compiling(plain, work)


def test_limits_name_their_flags(plain: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for name, flag in (("too deep", "--max-schema-depth"), ("too large", "--max-schema-kb")):
            with pytest.raises(InvalidRequest) as refusal:
                await compiler.compile(REFUSED[name][0])
            assert flag in refusal.value.hint
        assert len(await compiler.compile(JsonSchemaSpec(schema=nested(32)))) < MAX_GRAMMAR_CHARS

    compiling(plain, work)


def test_a_model_without_an_end_is_told_so() -> None:
    tokenizer = Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=tokenizer_json()))

    async def work(compiler: GrammarCompiler) -> None:
        with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
            await compiler.compile(JsonObjectSpec())

    compiling(tokenizer, work)


# What could take for ever.

HOSTILE: dict[str, GrammarSpec] = {
    "huge enum": JsonSchemaSpec(schema={"enum": [f"{i:x}{i * 7919 % 1000}" for i in range(4000)]}),
    "many optional properties": JsonSchemaSpec(
        schema={"type": "object", "properties": {f"p{i}": {} for i in range(500)}}
    ),
    "long string": JsonSchemaSpec(schema={"type": "string", "minLength": 50_000, "maxLength": 100_000}),
    "long list": JsonSchemaSpec(schema={"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    "repetition": RegexSpec(pattern="[a-z]{1,100000}"),
    "repetition of repetition": RegexSpec(pattern="((a{1,1000}){1,1000}){1,1000}"),
    "ambiguity": RegexSpec(pattern="(a|aa)+(a*)*b"),
    "many states": RegexSpec(pattern="[ab]*a[ab]{25}"),
    "mutual recursion": JsonSchemaSpec(
        schema={
            "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                "b": {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}},
            },
            "$ref": "#/$defs/a",
        }
    ),
    "doubling": JsonSchemaSpec(
        schema={
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
            | {"d30": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "ambiguous grammar": LarkSpec(text='start: e\ne: e e | e e e | "a" | '),
}


def test_what_looks_hostile_and_is_not_compiles_in_time(plain: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for spec in HOSTILE.values():
            await compiler.compile(spec)

    compiling(plain, work)


ENDLESS = JsonSchemaSpec(schema={"type": "integer", "multipleOf": 123_456_789})


class PatientProcess(compiler_module.GrammarProcess):
    """Only the endless grammar has no more time than a server gives it: any other may be late on a busy machine."""

    num_asked = 0

    def __init__(self, words: GrammarVocabulary, seconds: float) -> None:
        super().__init__(words, PATIENCE)
        self._limit_s = seconds

    async def ask(self, grammar: str) -> str:
        self._seconds = self._limit_s if "123456789" in grammar else PATIENCE
        self.num_asked += 1
        return await super().ask(grammar)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "GrammarProcess", PatientProcess)


async def asked(compiler: GrammarCompiler, count: int) -> None:
    """Return when the process works on so many grammars, or has."""
    process = compiler._process
    assert isinstance(process, PatientProcess)
    await until(lambda: process.num_asked == count, f"grammar {count}")


@pytest.mark.usefixtures("patient")
def test_a_grammar_that_takes_too_long_is_given_up_and_the_server_goes_on(plain: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(JsonObjectSpec())
        hung = asyncio.create_task(compiler.compile(ENDLESS))
        await asked(compiler, 2)
        assert await compiler.compile(JsonObjectSpec()), "what is known needs no turn"
        assert not hung.done(), "the event loop stood still"
        with pytest.raises(InvalidRequest, match="more than 1 s") as refusal:
            await hung
        assert "--grammar-timeout-s" in refusal.value.hint and refusal.value.param == "response_format"
        assert await compiler.compile(RegexSpec(pattern="afterwards"))

    compiling(plain, work, ServerOptions(grammar_timeout_s=1.0))


@pytest.mark.usefixtures("patient")
def test_a_grammar_that_took_too_long_is_not_tried_again_for_a_while(
    plain: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(compiler: GrammarCompiler) -> None:
        with pytest.raises(InvalidRequest, match=r"more than 0\.2 s"):
            await compiler.compile(ENDLESS)

    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(JsonObjectSpec())
        for _ in range(3):
            await refuse(compiler)
        await asked(compiler, 2)

    async def work_later(compiler: GrammarCompiler) -> None:
        await compiler.compile(JsonObjectSpec())
        for _ in range(2):
            await refuse(compiler)
        await asked(compiler, 3)

    compiling(plain, work, ServerOptions(grammar_timeout_s=0.2))
    monkeypatch.setattr(compiler_module, "LATE_SECONDS", 0)
    compiling(plain, work_later, ServerOptions(grammar_timeout_s=0.2))


OVERSIZED: dict[str, GrammarSpec] = {
    "grammar": LarkSpec(text="\n" * 70_000),
    "regex": RegexSpec(pattern="a" * 70_000),
    "choice": ChoiceSpec(options=["ab"] * 40_000),
    "schema": JsonSchemaSpec(schema={"enum": list(range(70_000))}),
    "names": JsonSchemaSpec(schema={"properties": {"x" * 70_000: {}}}),
    "tools": ToolCallsSpec(
        shape=TOOL_STYLES[0].shape,
        tools=[ToolSpec(name="f", parameters={"description": "x" * 7_000}) for _ in range(10)],
    ),
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_a_spec_is_refused_by_its_size_before_it_is_looked_at(
    plain: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(GrammarWriter, "write", lambda *_: pytest.fail("a grammar was written"))
    spec = OVERSIZED[name]

    async def work(compiler: GrammarCompiler) -> None:
        with pytest.raises(InvalidRequest, match="more than 64 KiB") as refusal:
            await compiler.compile(spec)
        assert "--max-schema-kb" in refusal.value.hint and refusal.value.param == spec.param

    compiling(plain, work)


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [("", "\n"), ("", "\na["), ("", " "), ("", "a"), ("", "\n?!"), ("a[", "stop ")],
    ids=["newlines", "options without an end", "spaces", "a name", "marks", "stops"],
)
def test_the_options_of_rules_are_found_in_linear_time(begin: str, repeated: str) -> None:
    writer = GrammarWriter({}, max_schema_depth=32)
    check_linear(lambda n: LarkSpec(text=begin + repeated * n), writer.write, 2_000)


def test_where_a_schema_is_wrong_is_told_in_short() -> None:
    """A long name is written out once, not for every schema below it."""
    schema = {"properties": {"x" * 30_000: {"properties": {str(i): {} for i in range(2000)} | {"last": {"not": {}}}}}}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"Unsupported keywords in the schema at /properties/xxx.*: not") as at:
            check_schema(schema, max_depth=32, param="response_format")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert len(at.value.message) < 300


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_ever_for_a_turn(plain: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        async with compiler._turn:
            with pytest.raises(Overloaded):
                await compiler.compile(JsonObjectSpec())
        assert await compiler.compile(JsonObjectSpec())

    compiling(plain, work, ServerOptions(grammar_timeout_s=0.5))


@pytest.mark.usefixtures("patient")
def test_whoever_leaves_does_not_leave_an_answer_to_the_next(plain: Tokenizer) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        await compiler.compile(JsonObjectSpec())
        leaving = asyncio.create_task(compiler.compile(ENDLESS))
        await asked(compiler, 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await compiler.compile(RegexSpec(pattern="(a"))

    compiling(plain, work, ServerOptions(grammar_timeout_s=3600))


def test_known_grammars_are_not_tried_again_and_not_kept_for_ever(
    plain: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "CACHED_GRAMMARS", 3)
    tried: list[str] = []
    ask = compiler_module.GrammarProcess.ask

    async def asking(process: compiler_module.GrammarProcess, grammar: str) -> str:
        tried.append(grammar)
        return await ask(process, grammar)

    monkeypatch.setattr(compiler_module.GrammarProcess, "ask", asking)

    async def work(compiler: GrammarCompiler) -> None:
        for pattern in ("a", "b", "a", "c", "a", "d", "e", "a", "b"):
            await compiler.compile(RegexSpec(pattern=pattern))
        assert [grammar[len("start: /")] for grammar in tried] == ["a", "b", "c", "d", "e", "b"]
        assert len(compiler._trials) == 3
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="unclosed group"):
                await compiler.compile(RegexSpec(pattern="(a"))
        assert len(tried) == 7, "a refusal is remembered too"

    compiling(plain, work)
