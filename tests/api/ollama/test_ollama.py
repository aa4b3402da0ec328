"""Ollama's interface: what is asked of the model, what Ollama's own clients read, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests import virtual_time
from tests.api.http import real_server, request
from tests.api.says import CALLS, EVERYTHING, SCHEMA, THOUGHT, model_that_says
from tests.api.scripted_engine import PAINTER, ScriptedEngine, ScriptedTokenizer, answer, with_logprobs
from tests.hub.fake_directory import make_directory
from tests.hub.fake_hub import FakeHub, serving
from weft.api.app import build_app
from weft.api.ollama.ollama_models import OLLAMA_VERSION
from weft.config import load
from weft.errors import ConfigError, EngineFault
from weft.text.tokenizer import FillInMiddle
from weft.types import Adapter, FinishReason, Output

ON = {"compat_api": ["ollama"]}
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "scripted", "prompt": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
CHAT, GENERATE = "/api/chat", "/api/generate"


def ask(engine: ScriptedEngine, path: str, body: dict[str, Any], **settings: Any) -> httpx.Response:
    return request(engine, "POST", path, load(ON | settings, env={}), json=body)


def get(path: str, engine: ScriptedEngine | None = None, **settings: Any) -> httpx.Response:
    return request(engine or ScriptedEngine(), "GET", path, load(ON | settings, env={}))


def whole(engine: ScriptedEngine, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    response = ask(engine, path, (HELLO if path == CHAT else PROMPT) | {"stream": False} | fields)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json"), response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(engine: ScriptedEngine, path: str = CHAT, **fields: Any) -> list[Any]:
    response = ask(engine, path, (HELLO if path == CHAT else PROMPT) | fields)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson"), response.text
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def refused(path: str, body: dict[str, Any], engine: ScriptedEngine | None = None) -> tuple[int, str]:
    response = ask(engine or ScriptedEngine(), path, body)
    assert response.json().keys() == {"error"}
    return response.status_code, response.json()["error"]


COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def test_a_stream_is_lines_the_last_one_with_counts() -> None:
    *pieces, last = streamed(ScriptedEngine())
    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": text} for text in ("Hello", ", ", "world")
    ]
    assert not any(piece["done"] for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last.keys() - pieces[0].keys() == COUNTS | {"done_reason"}
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 12)
    assert all(type(last[name]) is int and last[name] >= 0 for name in COUNTS)


@pytest.mark.parametrize(("path", "said"), [(CHAT, ("message", {"role": "assistant", "content": "Hi"})),
                                            (GENERATE, ("response", "Hi"))])  # fmt: skip
def test_an_answer_in_one_piece(path: str, said: tuple[str, Any]) -> None:
    body = whole(ScriptedEngine(answer("Hi", finish=FinishReason.LENGTH)), path)
    assert (body[said[0]], body["done"], body["done_reason"]) == (said[1], True, "length")
    assert body["model"] == "scripted" and body["created_at"].endswith("Z")
    assert body.keys() >= COUNTS


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_of_any_type_is_read_unless_a_page_in_a_browser_sent_it(content_type: str | None) -> None:
    """Ollama's own examples use `curl -d`, and LiteLLM says no type."""
    headers = {} if content_type is None else {"content-type": content_type}
    content = json.dumps(HELLO | {"stream": False})

    def sent(**more: str) -> int:
        config = load(ON, env={})
        return request(ScriptedEngine(), "POST", CHAT, config, content=content, headers=headers | more).status_code

    assert sent() == 200
    assert sent(origin="http://localhost:3000") == sent(**{"sec-fetch-site": "cross-site"}) == 415


def test_thoughts_and_calls_have_places_of_their_own() -> None:
    engine = model_that_says(EVERYTHING, range(0, len(EVERYTHING), 7))
    message = whole(engine, tools=TOOLS)["message"]
    assert (message["content"], message["thinking"]) == ("Let me look.", THOUGHT)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Oslo"}},
        {"name": "time", "arguments": {}},
    ]
    messages = [piece["message"] for piece in streamed(engine, tools=TOOLS)]
    assert "".join(m["content"] for m in messages) == "Let me look."
    assert "".join(m.get("thinking", "") for m in messages) == THOUGHT
    calls = [call["function"] for m in messages for call in m.get("tool_calls", [])]
    assert calls == [call["function"] for call in message["tool_calls"]]


def test_thoughts_are_left_out_where_none_are_wanted() -> None:
    assert "thinking" not in whole(model_that_says(EVERYTHING), think=False)["message"]
    body = whole(model_that_says(f"<think>{THOUGHT}</think>Oslo"), GENERATE, think="low")
    assert (body["thinking"], body["response"]) == (THOUGHT, "Oslo")


@pytest.mark.parametrize(
    ("think", "variables"),
    [(True, {"enable_thinking": True}), (False, {"enable_thinking": False}), (None, {}),
     ("low", {"enable_thinking": True, "reasoning_effort": "low"})],
)  # fmt: skip
def test_how_much_to_think_is_told_the_template(think: Any, variables: dict[str, Any]) -> None:
    engine = model_that_says("Oslo")
    engine.styles = replace(engine.styles, variables=frozenset({"enable_thinking", "reasoning_effort"}))
    whole(engine, think=think)
    assert engine.template_variables == variables


def test_what_had_no_effect_is_named_as_it_was_sent() -> None:
    options = {"num_predict": 5000, "num_ctx": 99}
    response = ask(ScriptedEngine(), CHAT, HELLO | {"think": True, "options": options})
    assert {*response.headers["weft-fields-without-effect"].split(", ")} == {
        "think", "options.num_predict", "options.num_ctx",
    }  # fmt: skip


def test_what_only_the_template_would_write_is_named() -> None:
    tokenizer = ScriptedTokenizer()
    tokenizer.fill_in_middle = FillInMiddle((), 1, 2, 3)
    for body, named in (
        ({"raw": True, "think": True}, "think"),
        ({"suffix": "end", "system": "Be brief."}, "system"),
        ({"raw": True, "top_logprobs": 2}, "top_logprobs"),
    ):
        response = ask(ScriptedEngine(tokenizer=tokenizer), GENERATE, PROMPT | body)
        assert response.status_code == 200 and response.headers["weft-fields-without-effect"] == named
        assert ask(ScriptedEngine(tokenizer=tokenizer), GENERATE, PROMPT | body, fields="strict").status_code == 400


def test_a_conversation_with_calls_and_results() -> None:
    engine = model_that_says("Sun.")
    call = {"function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "thinking": "t", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    whole(engine, messages=turns, tools=TOOLS)
    assert [message["role"] for message in engine.messages] == ["user", "assistant", "tool"]
    assert engine.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert engine.messages[1]["reasoning_content"] == "t"
    assert engine.messages[2]["name"] == "weather"


def test_an_answer_that_is_begun_goes_on() -> None:
    engine = ScriptedEngine()
    whole(engine, messages=[*HELLO["messages"], {"role": "assistant", "content": "Well,"}])
    assert engine.continue_final_message


def test_options_become_sampling_parameters() -> None:
    engine = ScriptedEngine()
    options = {
        "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "num_predict": 7, "stop": ["x"],
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "num_ctx": 4096, "mirostat": 1, "num_gpu": 99, "repeat_last_n": 64,
    }  # fmt: skip
    whole(engine, options=options, keep_alive="5m")
    [submitted] = engine.submitted
    params = submitted.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 5, 0.5, 0.1)
    assert (params.seed, params.max_tokens, params.stop, params.repetition_penalty) == (3, 7, ("x",), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)


@pytest.mark.parametrize("num_predict", [-2, -1, 0, None])
@pytest.mark.parametrize("fields", [{}, {"raw": True}])
def test_without_a_bound_the_answer_may_fill_the_context(num_predict: int | None, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    whole(engine, GENERATE, options={"num_predict": num_predict, "seed": -1}, **fields)
    assert (engine.submitted[0].params.max_tokens, engine.submitted[0].params.seed) == (None, None)


def test_generate_writes_a_chat_unless_it_is_raw() -> None:
    engine = ScriptedEngine()
    whole(engine, GENERATE, system="Be brief.")
    assert bytes(engine.submitted[0].prompt).decode() == "<system>Be brief.<user>hi"  # type: ignore[arg-type]
    whole(engine, GENERATE, raw=True)
    assert bytes(engine.submitted[1].prompt).decode() == "hi"  # type: ignore[arg-type]


def test_what_stands_between_two_texts() -> None:
    tokenizer = ScriptedTokenizer()
    tokenizer.fill_in_middle = FillInMiddle((), 1, 2, 3)
    engine = ScriptedEngine(tokenizer=tokenizer)
    whole(engine, GENERATE, suffix="end")
    assert engine.submitted[0].prompt == [1, *b"hi", 2, *b"end", 3]
    assert "insert" in ask(engine, "/api/show", {"model": "scripted"}).json()["capabilities"]
    assert "no tokens to fill in" in refused(GENERATE, PROMPT | {"suffix": "end"})[1]


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO | {"messages": []}), (GENERATE, {"model": "scripted"})])
def test_nothing_to_answer_loads_the_model(path: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    response = ask(engine, path, body)
    assert response.json()["done_reason"] == "load" and response.json()["done"]
    assert not engine.submitted


def test_logprobs_have_the_tokens_and_the_likeliest() -> None:
    figures = whole(ScriptedEngine(with_logprobs("xy")), logprobs=True, top_logprobs=2)["logprobs"]
    assert [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in figures] == [
        ("x", -0.5, 2),
        ("y", -0.5, 2),
    ]
    pieces = streamed(ScriptedEngine(with_logprobs("xy")), GENERATE, logprobs=True)
    assert [one["token"] for piece in pieces for one in piece.get("logprobs", [])] == ["x", "y"]


def test_a_stream_that_waits_says_so_in_lines_of_its_own() -> None:
    config = load(ON | {"keep_alive_s": 0.05}, env={})
    engine = ScriptedEngine([0.12, *answer("Hi")])
    response = request(engine, "POST", CHAT, config, run=virtual_time.run, json=HELLO)
    lines = [json.loads(line)["message"]["content"] for line in response.text.splitlines()]
    assert lines == ["", "", "Hi", ""]


def test_an_error_in_a_stream_is_its_last_line() -> None:
    *_, last = streamed(ScriptedEngine([Output(text="H", token_ids=[72]), EngineFault("it broke")]))
    assert last.keys() == {"error"} and "it broke" in last["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        (CHAT, HELLO | {"model": "nope"}, 404, "no model 'nope'"),
        (CHAT, HELLO | {"mesages": []}, 400, "messages"),
        (CHAT, HELLO | {"options": {"temprature": 1}}, 400, "such field. Did you mean 'temperature'"),
        (CHAT, HELLO | {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
        (CHAT, HELLO | {"tools": TOOLS}, 400, "tool"),
        (CHAT, HELLO | {"options": {"stop": ["x"] * 17}}, 400, "--max-stop"),
        (CHAT, HELLO | {"tools": [{"type": "function", "function": {"name": "no name"}}]}, 400, "tools[0]"),
        (GENERATE, PROMPT | {"template": "{{ .Prompt }}"}, 400, "template"),
        (GENERATE, PROMPT | {"format": "xml"}, 400, "format"),
        (GENERATE, PROMPT | {"raw": True, "system": "Be brief."}, 400, "system"),
        ("/api/embed", {"model": "scripted", "input": 5}, 400, "input"),
        ("/api/show", {"model": "nope"}, 404, "nope"),
        ("/api/show", {}, 400, "model"),
    ],
)  # fmt: skip
def test_refusals_are_one_text(path: str, body: dict[str, Any], status: int, word: str) -> None:
    found, error = refused(path, body)
    assert found == status and word in error, error


def test_vectors() -> None:
    engine = ScriptedEngine()
    body = ask(engine, "/api/embed", {"model": "scripted", "input": ["abc", "d"], "keep_alive": -1}).json()
    assert body["embeddings"] == [[3.0, 97.0], [1.0, 100.0]] and body["prompt_eval_count"] == 4
    assert ask(engine, "/api/embed", {"model": "scripted", "input": "abc"}).json()["embeddings"] == [[3.0, 97.0]]
    assert ask(engine, "/api/embed", {"model": "scripted", "input": ""}).json()["embeddings"] == []
    assert ask(engine, "/api/embeddings", {"model": "scripted", "prompt": "abc"}).json() == {"embedding": [3.0, 97.0]}
    assert len(engine.embedded) == 4


def test_a_long_input_is_cut_unless_that_is_refused() -> None:
    engine, long = ScriptedEngine(), {"model": "scripted", "input": "x" * 2000}
    assert ask(engine, "/api/embed", long).json()["embeddings"] == [[999.0, 120.0]]
    ask(engine, "/api/embed", long | {"truncate": False})
    assert len(engine.embedded[-1].prompt) == 2000


def test_models_are_listed_with_tags() -> None:
    engine = ScriptedEngine(images=PAINTER)
    engine.adapters.append(Adapter(name="legal", number=1, path="/legal"))
    listed = get("/api/tags", engine).json()["models"]
    assert [model["name"] for model in listed] == ["scripted:latest", "legal:latest"]
    assert listed[1]["details"]["parent_model"] == "scripted"
    [running] = get("/api/ps", engine).json()["models"]
    assert (running["name"], running["context_length"], running["size_vram"]) == ("scripted:latest", 1000, 0)
    for name in ("scripted", "scripted:latest", "legal:latest"):
        shown = ask(engine, "/api/show", {"model": name}).json()
        assert shown["model_info"]["weft.context_length"] == 1000
        assert whole(engine, model=name)["model"] == name


def test_a_model_tells_what_it_can() -> None:
    shown = ask(model_that_says(CALLS), "/api/show", {"name": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert "temperature 1" in shown["parameters"].splitlines()


def test_the_probes_of_clients() -> None:
    assert get("/").text == "Ollama is running"
    assert request(ScriptedEngine(), "HEAD", "/", load(ON, env={})).status_code == 200
    assert get("/api/version").json() == {"version": OLLAMA_VERSION}


def test_without_the_flag_there_is_nothing_of_it() -> None:
    for method, path in (("GET", "/api/tags"), ("POST", CHAT), ("POST", "/completion")):
        response = request(ScriptedEngine(), method, path)
        assert response.status_code == 404 and response.json()["error"]["code"] == "unknown_url"


def test_an_interface_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match="'olama': there are ollama and llamacpp"):
        build_app(ScriptedEngine(), load({"compat_api": ["llamacpp,olama"]}, env={}))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "theirs"))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serving(FakeHub(make_directory(tmp_path / "remote"))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def weft_home(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_HOME", str(tmp_path / "home"))
        yield tmp_path / "home"


@pytest.mark.parametrize("name", ["org/name", "hf.co/org/name", "org/name:latest"])
def test_a_pull_tells_of_its_progress(hub: FakeHub, weft_home: Path, name: str) -> None:
    response = ask(ScriptedEngine(), "/api/pull", {"model": name})
    assert response.headers["content-type"] == "application/x-ndjson"
    first, *_, note, last = [json.loads(line) for line in response.text.splitlines()]
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert "this server serves scripted" in note["status"]
    assert [*(weft_home / "hub" / "org--name").glob("*/model-00002-of-00002.safetensors")]


def test_a_pull_that_is_waited_for(hub: FakeHub, weft_home: Path) -> None:
    body = {"model": "org/name", "stream": False, "insecure": True}
    assert ask(ScriptedEngine(), "/api/pull", body).json() == {"status": "success"}
    hub.refusal = (503, "")
    assert ask(ScriptedEngine(), "/api/pull", body).json() == {"status": "success"}, "it is there"


@pytest.mark.parametrize("name", ["no-such-model", "/etc", "../secret", "~", "x" * 900])
def test_only_names_are_pulled_and_no_paths(name: str, weft_home: Path) -> None:
    assert refused("/api/pull", {"model": name, "stream": False})[0] == 400
    response = ask(ScriptedEngine(), "/api/pull", {"model": name})
    assert "There is no model" in json.loads(response.text.splitlines()[-1])["error"]


def test_a_served_model_is_there_already() -> None:
    lines = ask(ScriptedEngine(), "/api/pull", {"model": "scripted:latest"}).text.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["pulling manifest", "success"]


def test_only_the_operator_pulls_where_there_are_keys() -> None:
    def pull(key: str, **settings: Any) -> httpx.Response:
        config = load(ON | settings, env={})
        headers = {"Authorization": f"Bearer {key}"}
        return request(ScriptedEngine(), "POST", "/api/pull", config, json={"model": "org/none"}, headers=headers)

    assert pull("user", api_key=["user"]).status_code == 403
    assert "--admin-key" in pull("user", api_key=["user"]).json()["error"]
    assert pull("user", api_key=["user"], admin_key=["root"]).status_code == 403
    assert pull("", api_key=["user"], admin_key=["root"]).json().keys() == {"error"}


def test_their_own_client_reads_every_answer() -> None:
    import ollama

    engine = model_that_says(EVERYTHING, range(0, len(EVERYTHING), 9))
    with real_server(build_app(engine, load(ON, env={}))) as url, ollama.Client(host=url) as client:
        assert client.list().models[0].model == "scripted:latest"
        assert client.ps().models[0].context_length == 1000
        assert client.show("scripted").capabilities == ["completion", "tools", "thinking", "embedding"]
        said = client.chat("scripted", HELLO["messages"], tools=TOOLS).message
        assert said.tool_calls and said.tool_calls[0].function.arguments == {"city": "Oslo"}
        pieces = [*client.chat("scripted", HELLO["messages"], tools=TOOLS, stream=True)]
        assert "".join(piece.message.content or "" for piece in pieces) == "Let me look."
        assert pieces[-1].done_reason == "stop" and pieces[-1].eval_count == 7
        assert client.generate("scripted", "hi", think=True).thinking == THOUGHT
        assert client.embed("scripted", ["a", "b"]).embeddings == [[1.0, 97.0], [1.0, 98.0]]
        assert client.embeddings("scripted", "a").embedding == [1.0, 97.0]
        assert client.pull("scripted").status == "success"
        with pytest.raises(ollama.ResponseError, match="no model 'nope'") as refusal:
            client.chat("nope", HELLO["messages"])
        assert refusal.value.status_code == 404
