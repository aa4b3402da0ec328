"""The playground in a real browser, with the default model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from tests.api.http import real_server
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.e2e.server import Server
from tests.page.conftest import KEY
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.config import load

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

OpenPage = Callable[..., "Page"]


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def wait_for_answer(page: Page, count: int = 1) -> Locator:
    """Return the last answer, when so many have ended."""
    answers(page).nth(count - 1).wait_for()
    expect_count(page.locator("article[aria-busy=true]"), 0)
    assert answers(page).count() == count
    return answers(page).nth(count - 1)


def expect_count(found: Locator, count: int) -> None:
    wait_until(lambda: found.count() == count, f"{count} of {found}")


def wait_for_letters(page: Page, count: int, answer: int = 1) -> None:
    """Wait until an answer has so many. The page's policy lets no test's string run in it, so this asks."""
    shown = page.locator("article.assistant .markdown").nth(answer - 1)
    shown.wait_for()
    wait_until(lambda: len(shown.inner_text()) > count, f"{count} letters of the answer")


def kept_messages(page: Page) -> list[dict[str, Any]]:
    """Return the messages of all chats that the browser has kept."""
    chats: list[dict[str, Any]] = page.evaluate(
        """() => new Promise((resolve) => {
            const opened = indexedDB.open('weft', 1);
            opened.onsuccess = () => {
                const asked = opened.result.transaction('conversations').objectStore('conversations').getAll();
                asked.onsuccess = () => (opened.result.close(), resolve(asked.result));
            };
        })"""
    )
    return [message for chat in chats for message in chat["messages"].values()]


def test_a_chat_turn_streams_and_tells_its_timings(open_page: OpenPage) -> None:
    page = open_page(params={"max_tokens": 12, "temperature": 0, "ignore_eos": True})
    say(page, "Name three colours.")
    answer = wait_for_answer(page)
    assert answer.locator(".markdown").inner_text().strip()
    stats = answer.locator(".stats").inner_text()
    assert "TTFT" in stats and "tok/s" in stats and "tokens" in stats and "prompt" in stats
    assert page.get_by_role("navigation", name="Chats").get_by_text("Name three colours.").is_visible()
    # A second turn finds the first one in the prefix cache, and a reload finds both.
    say(page, "And three more.")
    assert "cached" in wait_for_answer(page, 2).locator(".stats").inner_text()
    wait_until(lambda: [message.get("finish") for message in kept_messages(page)].count("length") == 2, "the store")
    page.reload()
    answers(page).nth(1).wait_for()
    assert answers(page).count() == 2


def test_a_message_is_answered_that_is_sent_before_the_models_are_known(open_page: OpenPage) -> None:
    page = open_page(params={"max_tokens": 4})
    page.get_by_text("is ready").wait_for()
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    say(page, "Hi")
    page.get_by_role("article", name="Your message").wait_for()
    held[0].continue_()
    assert not wait_for_answer(page).get_by_role("alert").count()


def test_stop_ends_the_answer_and_the_request(open_page: OpenPage, playground: Server) -> None:
    page = open_page(params={"max_tokens": 2000, "ignore_eos": True})
    stops = (page.get_by_label("Stop the answer").click, lambda: page.keyboard.press("Escape"))
    for count, stop in enumerate(stops, 1):
        say(page, "Count to a thousand.")
        wait_for_letters(page, 10, count)
        stop()
        answer = wait_for_answer(page, count)
        assert "stopped" in answer.locator(".stats").inner_text()
        assert len(answer.locator(".markdown").inner_text()) > 10
        wait_until(lambda: playground.metric("weft_num_requests_running") == 0, "the end of the request")


def test_answers_and_messages_have_branches(open_page: OpenPage) -> None:
    page = open_page(params={"max_tokens": 8})
    say(page, "Hello there")
    wait_for_answer(page)
    page.get_by_label("Answer again").click()
    page.get_by_text("2/2").wait_for()
    wait_for_answer(page)
    page.get_by_label("Previous branch").click()
    page.get_by_text("1/2").wait_for()
    page.get_by_label("Message", exact=True).press("ArrowUp")
    editor = page.locator(".editor textarea")
    editor.wait_for()
    wait_until(lambda: editor.evaluate("field => field === document.activeElement"), "the editor has the focus")
    editor.fill("Good evening")
    page.keyboard.press("Enter")
    page.get_by_role("article", name="Your message").get_by_text("Good evening").wait_for()
    wait_for_answer(page)
    page.get_by_role("article", name="Your message").get_by_label("Previous branch").click()
    page.get_by_role("article", name="Your message").get_by_text("Hello there").wait_for()


def test_a_tool_call_is_shown_run_and_answered(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_text("Tools", exact=True).click()
    page.locator("details[open]").filter(has_text="Tools, as JSON").get_by_role("button", name="Example").click()
    page.get_by_label("Tool choice").select_option("calculate")
    page.get_by_label("Max tokens", exact=True).fill("100")
    page.get_by_label("Temperature", exact=True).fill("0")
    say(page, "What is 17 times 23?")
    call = page.get_by_role("group", name="Call of the tool calculate")
    call.get_by_text("expression").wait_for()
    call.get_by_label("Result", exact=True).wait_for()
    assert '"result"' in call.inner_text() or '"error"' in call.inner_text()
    wait_for_answer(page, 2)


def test_the_result_of_another_tool_is_the_users_to_give(open_page: OpenPage) -> None:
    tool = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object", "properties": {}}}}
    page = open_page(tools=json.dumps([tool]), toolChoice="depth", params={"max_tokens": 40, "temperature": 0})
    say(page, "How deep is the lake?")
    page.get_by_label("Result of depth").fill('{"metres": 42}')
    page.get_by_role("button", name="Give the result").click()
    wait_for_answer(page, 2)
    assert "42" in page.get_by_label("Result", exact=True).inner_text()


def test_structured_output_fits_its_schema(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_text("Structured output", exact=True).click()
    page.get_by_label("The answer is").select_option("json_schema")
    schema = page.get_by_label("JSON schema", exact=True)
    schema.fill("{")
    page.get_by_role("alert").first.wait_for()
    wanted = {"type": "object", "properties": {"rank": {"enum": [1, 2, 3]}}, "required": ["rank"]}
    schema.fill(json.dumps(wanted | {"additionalProperties": False}))
    say(page, "Rank it.")
    answer = wait_for_answer(page)
    assert isinstance(json.loads(answer.locator("pre").inner_text())["rank"], int)


def test_an_image_shows_its_steps_and_stays_in_the_gallery(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page("/#/images")
    page.get_by_label("Prompt", exact=True).fill("a red circle on a blue background")
    page.get_by_label("Seed", exact=True).fill("7")
    page.get_by_label("Steps").fill("60")
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                const text = document.querySelector('.drawing figcaption')?.innerText;
                if (text) window.seen.push([text, document.querySelectorAll('.drawing img').length]);
            }).observe(document.body, {subtree: true, childList: true, characterData: true});
        }"""
    )
    page.get_by_role("button", name="Make the image").click()
    shown = page.get_by_role("button", name="Show: a red circle")
    shown.wait_for()
    seen = page.evaluate("window.seen")
    assert any(text.startswith("step ") for text, _ in seen) and any(pictures for _, pictures in seen)
    assert shown.locator("img").evaluate("image => image.naturalWidth") == 32
    page.reload()
    shown.click()
    assert "60" in page.get_by_role("dialog").inner_text() and "7" in page.get_by_role("dialog").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    page.get_by_role("button", name="Close", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    file = tmp_path / "images.json"
    kept = json.loads(Path(download.value.path()).read_text())
    hostile = {**kept["images"][0], "id": "x", "b64": "PHN2ZyBvbmxvYWQ9ImFsZXJ0KCkiPg=="}
    file.write_text(json.dumps({**kept, "images": [*kept["images"], hostile, None]}))
    other = open_page("/#/images")
    other.get_by_label("A file of exported images").set_input_files(file)
    other.get_by_text("1 image was imported.").wait_for()
    other.get_by_role("button", name="Show: a red circle").click()
    other.get_by_role("button", name="Delete").click()
    other.get_by_role("button", name="Undo").click()
    other.get_by_role("button", name="Show: a red circle").wait_for()


def test_a_wrong_key_is_told(open_page: OpenPage) -> None:
    page = open_page(key="")
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_text("This server asks for an API key.").wait_for()
    dialog.get_by_label("Key", exact=True).fill("swordfish")
    dialog.get_by_role("button", name="Use this key").click()
    dialog.get_by_text("The server did not accept this key.").wait_for()
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_label("Remember it").check()
    dialog.get_by_role("button", name="Use this key").click()
    page.get_by_text("The server accepts the key.").wait_for()
    page.get_by_label("Model", exact=True).first.wait_for()
    page.reload()
    page.get_by_text("is ready").wait_for()
    assert KEY not in page.url


HOSTILE = [
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><svg onload='window.hacked = 1'>",
    "[click](javascript:window.hacked=1) [here](data:text/html,<script>hacked=1</script>) <javascript:window.hacked=1>",
    "![x](http://127.0.0.1:9/a.png) <style>body{display:none}</style><link rel=stylesheet href=//127.0.0.1:9/x.css>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe><base href='//127.0.0.1:9'><form action=//127.0.0.1:9>",
    "```html\n<script>window.hacked = 1</script>\n```\n\n| <img src=x onerror=hacked=1> | b |\n|---|---|\n"
    "| [a](javascript:hacked=1) | c |",
    "> " * 60 + "deep **" + "*" * 200 + "\n" + "- " * 60 + "x\n" + "[" * 200 + "](" * 50,
]


def test_hostile_answers_are_text(open_page: OpenPage) -> None:
    """A scripted engine streams them, in pieces as small as tokens: the default model would take half a minute. A tab
    that asks another server for something fails (open_page)."""
    engine = ScriptedEngine()
    with real_server(build_app(engine, load(env={}))) as url:
        page = open_page(url=url)
        for text in HOSTILE:
            engine.script = answer(*(text[at : at + 5] for at in range(0, len(text), 5)))
            check_harmless(page)
            page.get_by_label("New chat").click()
            expect_count(answers(page), 0)


def check_harmless(page: Page) -> None:
    say(page, "Say it.")
    assert wait_for_answer(page).inner_text().strip()
    for link in page.locator("article.assistant a").all():
        link_address = link.get_attribute("href") or ""
        assert link_address.startswith(("http://", "https://", "mailto:")), link_address
    found = page.locator("article.assistant").locator("script, iframe, style, link, form, object, embed, base, img")
    assert found.count() == 0
    for control in page.locator("article.assistant .markdown").locator("a, span").all():
        if control.is_visible():
            control.dispatch_event("mouseover")
    assert page.evaluate("window.hacked") is None
    assert page.locator("header.top").is_visible()


def test_an_answer_goes_on_when_the_engine_dies(open_page: OpenPage, playground: Server) -> None:
    fields = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me of the sea."}], **fields}
    headers = {"Authorization": f"Bearer {KEY}"}
    whole = httpx.post(playground.url + "/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE)
    wanted = whole.json()["choices"][0]["message"]["content"]
    page = open_page(params=fields)
    say(page, "Tell me of the sea.")
    wait_for_letters(page, 40)
    first = playground.engine_pid()
    os.kill(first, signal.SIGKILL)
    answer = wait_for_answer(page)
    page.get_by_label("Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == wanted
    assert "60 tokens" in answer.locator(".stats").inner_text()
    assert answer.get_by_role("alert").count() == 0
    wait_until(lambda: playground.get("/health").status_code == 200, "the next engine")
    assert playground.engine_pid() != first


def test_chats_are_exported_and_imported(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(params={"max_tokens": 6})
    say(page, "Remember this.")
    kept = wait_for_answer(page).locator(".markdown").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export", exact=True).click()
    file = tmp_path / "chats.json"
    file.write_bytes(Path(download.value.path()).read_bytes())
    assert KEY not in file.read_text()
    other = open_page()
    other.get_by_label("A file of exported chats").set_input_files(file)
    other.get_by_text("1 chat was imported.").wait_for()
    other.get_by_role("link", name="Remember this.").click()
    assert wait_for_answer(other).locator(".markdown").inner_text() == kept
    file.write_text('{"weft": 1, "conversations": [{"id": "<b>", "messages": 5}, 7, null], "x": []}')
    other.get_by_label("A file of exported chats").set_input_files(file)
    other.get_by_text("0 chats were imported.").wait_for()
    file.write_text("no JSON")
    other.get_by_label("A file of exported chats").set_input_files(file)
    other.get_by_text("Not imported").wait_for()


def test_two_tabs_write_in_one_chat(open_page: OpenPage) -> None:
    first = open_page(params={"max_tokens": 2000, "ignore_eos": True})
    say(first, "Count to a thousand.")
    wait_for_letters(first, 10)
    second = first.context.new_page()
    second.goto(first.url)
    answers(second).locator(".markdown").wait_for()
    # The second tab sees that the first one is writing, and its own message does not replace the first one's answer.
    expect_count(second.locator("article[aria-busy=true]"), 1)
    say(second, "Hello")
    answers(first).nth(1).wait_for()
    first.get_by_label("Stop the answer").click()
    second.get_by_label("Stop the answer").click()
    for page in (first, second):
        expect_count(page.locator("article[aria-busy=true]"), 0)
    wait_until(lambda: not any(message.get("isPending") for message in kept_messages(first)), "the store")
    first.bring_to_front()  # a tab behind another draws once a second, and clicks wait for what is drawn
    first.reload()
    answers(first).nth(1).wait_for()
    assert [answer.get_by_role("alert").count() for answer in answers(first).all()] == [0, 0]
    first.get_by_role("navigation", name="Chats").get_by_text("Count to a thousand.").hover()
    first.get_by_role("button", name="Delete Count to a thousand.").click()
    expect_count(second.get_by_role("navigation", name="Chats").get_by_text("Count to a thousand."), 0)
    first.get_by_role("button", name="Undo").click()
    second.get_by_role("navigation", name="Chats").get_by_text("Count to a thousand.").wait_for()


def test_a_request_is_copied_without_the_key(open_page: OpenPage) -> None:
    page = open_page(params={"max_tokens": 4}, system="It's brief.")
    say(page, "Hi")
    wait_for_answer(page)
    page.get_by_label("Copy as curl or Python").click()
    page.get_by_label("Copy the code").last.click()
    command = page.evaluate("navigator.clipboard.readText()")
    assert "$WEFT_API_KEY" in command and KEY not in command and "It'\\''s brief." in command
    page.get_by_role("radio", name="Python").check(force=True)
    page.get_by_label("Copy the code").last.click()
    program = page.evaluate("navigator.clipboard.readText()")
    compile(program, "copied.py", "exec")
    assert "from openai import OpenAI" in program and KEY not in program


def test_the_reference_needs_no_other_server(open_page: OpenPage) -> None:
    page = open_page("/docs")
    page.get_by_text("/v1/chat/completions").first.click()
    page.get_by_text("repetition_penalty").first.wait_for()
    page.get_by_label("Find").fill("images")
    page.get_by_text("/v1/images/generations").first.wait_for()
    assert page.get_by_text("/v1/chat/completions").count() == 0


def test_the_keyboard_is_enough(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_text("is ready").wait_for()
    page.locator("main").focus()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("Alt+2")
    page.get_by_role("heading", name="Images").wait_for()
    page.keyboard.press("Alt+1")
    page.get_by_label("Message", exact=True).wait_for()
    for _ in range(40):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            "(({outlineStyle, outlineWidth}) => [document.activeElement.tagName, outlineStyle, outlineWidth])"
            "(getComputedStyle(document.activeElement))"
        )
        assert focus[0] in ("BODY", "TEXTAREA", "INPUT") or focus[1] != "none", focus


CONTRAST = """() => {
    const parse = (text) => {
        const [r, g, b, a = 1] = text.match(/-?[\\d.]+/g).map(Number);
        return text.startsWith('color(') ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
    };
    const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
    const light = (colour) => {
        const [r, g, b] = colour.slice(0, 3).map((v) => {
            const share = v / 255;
            return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        if (!element) return [255, 255, 255, 1];
        const own = parse(getComputedStyle(element).backgroundColor);
        return own[3] === 1 ? own : over(own, ground(element.parentElement));
    };
    const poor = [];
    for (const element of document.querySelectorAll('#page *')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility() || element.closest(':disabled, .toast')) continue;
        const below = ground(element);
        const [one, other] = [light(over(parse(getComputedStyle(element).color), below)), light(below)];
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (ratio < 4.5) poor.push([element.className, element.textContent.slice(0, 40), ratio.toFixed(2)]);
    }
    const nameless = [...document.querySelectorAll('button, a, input, select, textarea')]
        .filter((item) => item.checkVisibility())
        .filter((item) => !(item.ariaLabel || item.textContent.trim() || item.labels?.length || item.title))
        .map((item) => item.outerHTML.slice(0, 80));
    return [poor, nameless];
}"""


MARKDOWN = """# A heading

Text with `code`, **strong**, a [link](https://example.org).

| a | b |
|--:|---|
| 1 | 2 |

> A quotation

```python
def f(x: int) -> str:  # a comment
    return "a" + str(42)
```
"""
ANSWERED: dict[str, Any] = {
    "id": "a",
    "title": "Markdown",
    "messages": {
        "q": {"parent": None, "role": "user", "content": "Show me."},
        "r": {"parent": "q", "role": "assistant", "content": MARKDOWN, "stats": {"ttftMs": 40, "promptTokens": 9}},
        "s": {"parent": "r", "role": "user", "content": "مرحبا"},
        "t": {"parent": "s", "role": "assistant", "content": "- أهلا\n- word", "error": "It broke off."},
    },
    "lanes": [{"head": "t", "settings": {}}],
}
SETTLED = """async () => {
    for (let quiet = 0; quiet < 3; quiet++) {
        await new Promise(requestAnimationFrame);
        const running = document.getAnimations();
        await Promise.allSettled(running.map((one) => one.finished));
        if (running.length) quiet = -1;
    }
}"""
"""Colours that change from one to the other have neither's contrast; and where one has changed, those inherited from it
begin to."""
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


@pytest.mark.parametrize("path", ["/", "/#/chat/a", "/#/images", "/docs"])
def test_texts_have_contrast_and_controls_have_names(open_page: OpenPage, tmp_path: Path, path: str) -> None:
    """The contrast is WCAG's AA: 4.5 to 1."""
    page = open_page(path)
    page.locator(".operation, .image-form, .starters").first.wait_for()
    if path.endswith("/a"):
        file = tmp_path / "chats.json"
        file.write_text(json.dumps({"weft": 1, "conversations": [ANSWERED]}))
        page.get_by_label("A file of exported chats").set_input_files(file)
        page.get_by_role("navigation", name="Chats").get_by_text("Markdown").click()
        page.get_by_role("alert").get_by_text("It broke off.").wait_for()
        assert page.locator("ul", has_text="word").last.evaluate("list => getComputedStyle(list).direction") == "rtl"
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        expect_count(page.locator(f"html[data-theme={theme}]"), 1)
        page.evaluate(SETTLED)
        poor, nameless = page.evaluate(CONTRAST)
        assert not poor and not nameless, theme
