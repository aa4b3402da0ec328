from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.growth import check_linear
from weft.errors import InvalidRequest, ModelError, WeftError
from weft.text import template_sandbox
from weft.text.chat_template import ChatTemplate, _up_to_the_end_of
from weft.text.template_sandbox import TemplateLimits
from weft.text.tokenizer import Tokenizer
from weft.types import TextAssets

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    try:
        return template.render(messages, **options)
    finally:
        template.close()


@pytest.fixture
def sandbox_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The CPU seconds of every render process, once it has ended."""
    seconds: list[float] = []
    end = template_sandbox._end

    def end_and_count(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        # Popen.kill would wait for one that has ended.
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seconds.append(time.clock_gettime(~process.pid << 3 | 2))
        end(process, channel)

    monkeypatch.setattr(template_sandbox, "_end", end_and_count)
    return seconds


def test_messages_special_tokens_and_the_generation_prompt_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source) == "<s>[user] hello</s>[assistant]"
    assert render(source, add_generation_prompt=False) == "<s>[user] hello</s>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in [1, 2, 3] %}\n  {% if i == 2 %}\n  {% break %}\n  {% endif %}\n{{ i }}\n{% endfor %}\n", "1\n"),
        ("{{ {'é': '<a>', 'b': [1]} | tojson }}", '{"é": "<a>", "b": [1]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].content.upper() ~ messages[-1]['role'][:2] }}", "HELLOus"),
    ],
)
def test_what_published_templates_use_is_there(source: str, text: str) -> None:
    assert render(source) == text


def test_tools_and_extra_variables_reach_the_template() -> None:
    source = "{{ tools[0].name }} {{ enable_thinking }}"
    assert render(source, tools=[{"name": "clock"}], extra={"enable_thinking": False}) == "clock False"


def test_extra_variables_cannot_replace_the_conversation() -> None:
    with pytest.raises(InvalidRequest, match="bos_token, messages"):
        render("", extra={"messages": [], "bos_token": "x"})


def test_declared_names_what_the_template_reads() -> None:
    template = ChatTemplate(
        "{% set a = 1 %}{{ a }}{{ messages }}{% if enable_thinking %}{{ raise_exception('x') }}{% endif %}",
        bos_token=None,
        eos_token=None,
    )
    assert template.declared == {"messages", "enable_thinking"}


def test_the_templates_own_error_is_the_clients() -> None:
    with pytest.raises(InvalidRequest, match=r"^Roles must alternate$"):
        render("{{ raise_exception('Roles must alternate') }}")


def test_messages_that_the_template_cannot_take_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="could not render these messages: TypeError"):
        render("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}])
    with pytest.raises(InvalidRequest, match="not plain JSON"):
        render("", [{"role": "user", "content": object()}])


def test_a_template_that_does_not_parse_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"cannot be compiled: .*, line 2"):
        render("a\n{% for %}")


def test_a_model_without_a_template_says_what_to_use_instead(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions"):
        ChatTemplate.from_assets(TextAssets(kind="gpt2"), byte_level)


GROW = "{%% set ns = namespace(x='aaaaaaaa') %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}"

HOSTILE = {
    "a huge range": "{% for i in range(10**9) %}{% endfor %}",
    "loops without output": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling by +": GROW % "ns.x + ns.x",
    "doubling by ~": GROW % "ns.x ~ ns.x",
    "a huge string": "{{ 'a' * 10**10 }}",
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "a huge width": "{{ '%1000000000d' % 1 }}",
    "a huge filter": "{{ 'a' | center(10**10) }}",
    "endless output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "an endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a class": "{{ ''.__class__ }}",
    "globals": "{{ lipsum.__globals__ }}",
    "an attribute by filter": "{{ (lipsum | attr('__globals__')) }}",
    "a format string": "{{ '{0.__class__}'.format('') }}",
    "changing the messages": "{{ messages.append(1) }}",
    "an include": "{% include '/etc/passwd' %}",
    "nested parentheses": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "nested lists": "{{ " + "[" * 6000 + "]" * 6000 + " }}",
    "nested blocks": "{% if 1 %}" * 6000 + "{% endif %}" * 6000,
    "a long chain": "{{ a" + ".b" * 6000 + " }}",
    "a long sum": "{{ 1" + " + 1" * 6000 + " }}",
    "a long negation": "{{ " + "not " * 6000 + "1 }}",
    "a long source": "a" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_an_error_soon(name: str, sandbox_seconds: list[float]) -> None:
    with pytest.raises(WeftError) as caught:
        render(HOSTILE[name])
    # The kernel ends it after 2 s of compiling and 1 of rendering; its start comes on top.
    assert sum(sandbox_seconds) < 6
    assert bool(sandbox_seconds) == (name != "a long source")
    assert len(str(caught.value)) < 1500


def test_a_template_cannot_reach_the_operating_system(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    with pytest.raises(ModelError, match="__globals__"):
        render("{{ lipsum.__globals__['os'].system('touch " + str(reached) + "') }}")
    assert not reached.exists()


@pytest.mark.parametrize(
    "attempt", ["open('/dev/null')", "__import__('socket').socket()", "__import__('os').pipe()", "bytearray(2**30)"]
)
def test_code_that_got_out_of_the_sandbox_would_find_nothing_to_open(attempt: str) -> None:
    setup = "import socket, os; from weft.text.template_sandbox_child import bound_resources; bound_resources(2**29)"
    bounded = f"{setup}; {attempt}"
    done = subprocess.run([sys.executable, "-c", bounded], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr or "MemoryError" in done.stderr


def test_after_a_template_was_stopped_the_next_render_works() -> None:
    source = "{% for i in range(messages | length * 9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(source, bos_token=None, eos_token=None, limits=TemplateLimits(render_seconds=0.2))
    with pytest.raises(ModelError, match=r"longer than 0\.2 s"):
        template.render(HELLO)
    assert template.render([]) == "done"


def test_after_close_the_next_render_works() -> None:
    template = ChatTemplate("x", bos_token=None, eos_token=None)
    template.close()
    assert template.render(HELLO) == "x"


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", bos_token=None, eos_token=None)
    wrong: list[str] = []

    def work(name: str) -> None:
        for turn in range(50):
            content = f"{name}{turn}" * 1000
            if template.render([{"role": "user", "content": content}]) != content:
                wrong.append(content)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_half_a_character_passes_through_for_the_tokenizer_to_name() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "a\ud83d"}]) == "a\ud83d"


def test_a_variable_that_the_template_never_reads_is_refused() -> None:
    source = "{{ messages[0].content }}{{ tone }}"
    assert render(source, extra={"tone": "!"}) == "hello!"
    with pytest.raises(InvalidRequest, match="no variable 'mood'; it has: tone") as caught:
        render(source, extra={"mood": "?"})
    assert caught.value.param == "chat_template_kwargs"


def test_the_final_message_is_continued() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "hello"}]
    text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>hello<end>\n<assistant>hello"


def test_the_end_of_the_final_message_is_found_in_linear_time() -> None:
    def search(half: str) -> None:
        with pytest.raises(InvalidRequest, match="cannot be continued"):
            _up_to_the_end_of(f"{half}b{half}", 10 * half)

    check_linear("a".__mul__, search, 2_000)


def test_a_final_message_that_the_template_changes_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render("{{ messages[0].content | upper }}", continue_final_message=True)
