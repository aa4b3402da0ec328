"""The live engine view in a real browser, while real requests run."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.server import Server
from tests.page.conftest import KEY, PHONE
from tests.page.test_screenshots import shoot  # noqa: F401 - a fixture
from tests.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Request

OpenPage = Callable[..., "Page"]
Work = Callable[[httpx.AsyncClient, int], Awaitable[httpx.Response]]

pytestmark = pytest.mark.timeout(900)

HEADERS = {"authorization": f"Bearer {KEY}"}


class Load:
    """Clients that ask again and again, until they go away in the midst of it: three chat, one draws, one embeds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self.num_answers = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE)

    async def _run(self) -> None:
        works = (self._chat, self._chat, self._chat, self._draw, self._embed)
        async with (
            httpx.AsyncClient(base_url=self._url, headers=HEADERS, timeout=PATIENCE) as client,
            asyncio.TaskGroup() as group,
        ):
            clients = [group.create_task(self._repeat(client, work)) for work in works]
            await asyncio.to_thread(self._stopped.wait)
            for one in clients:
                one.cancel()

    async def _repeat(self, client: httpx.AsyncClient, work: Work) -> None:
        for number in itertools.count():
            assert (await work(client, number)).status_code == 200
            self.num_answers += 1

    async def _chat(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        text = f"{number}. Tell me about the sea, and about " + "the wind and " * (10 + 15 * (number % 3))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "ignore_eos": True}
        return await client.post("/v1/chat/completions", json=body)

    async def _draw(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        body = {"prompt": "a red circle on a blue background", "seed": number, "num_inference_steps": 15}
        return await client.post("/v1/images/generations", json=body)

    async def _embed(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        return await client.post("/v1/embeddings", json={"input": f"{number} " + "a bird and " * 30})


@pytest.fixture
def load(playground: Server) -> Iterator[Load]:
    load = Load(playground.url)
    yield load
    load.stop()


def value_of(page: Page, name: str) -> float:
    """Return the number of a tile."""
    tile = page.locator(".tile", has=page.get_by_text(name, exact=True))
    found = re.search(r"[\d.,]+", tile.locator(".tile-value").inner_text())
    return float(found[0].replace(",", "")) if found else 0.0


def seen(page: Page, condition: Callable[[], bool], what: str) -> None:
    def holds() -> bool:
        page.wait_for_load_state()  # lets the browser's messages in
        return condition()

    wait_until(holds, what)


def described(found: Locator, pattern: str) -> bool:
    """Return whether the text of one of these plots or bars is as this pattern."""
    return any(re.search(pattern, one.get_attribute("aria-label") or "") for one in found.all())


def test_the_live_view_under_load(open_page: OpenPage, load: Load) -> None:
    page = open_page("/#/live")
    page.locator(".pill", has_text="live").wait_for()
    seen(page, lambda: value_of(page, "Running") > 0, "running requests")
    seen(page, lambda: value_of(page, "Output") > 0, "a speed")
    seen(page, lambda: value_of(page, "First token") > 0, "a time to the first token")
    budget = page.get_by_test_id("step-budget").get_by_role("img")
    for kind in ("decode", "prefill", "denoise", "encode"):
        seen(page, partial(described, budget, rf"{kind} (0\.)?[1-9]"), f"budget that {kind} took")
    cache = page.get_by_test_id("kv-map").get_by_role("img")
    seen(page, partial(described, cache, r"[1-9]\d* in use, [1-9]\d* cached"), "blocks in use and cached")
    bars = page.get_by_test_id("requests").get_by_role("img")
    for phases in ("prefill .*decode", "encode .*denoise"):
        seen(page, partial(described, bars, phases), f"a request's {phases}")
    assert "about the sea" not in page.content(), "no text of a prompt is shown"
    assert page.get_by_role("row", name=re.compile("smollm2.*native on cpu")).count() == 1


def test_a_restart_is_counted_and_the_view_goes_on(open_page: OpenPage, load: Load, playground: Server) -> None:
    page = open_page("/#/live")
    page.locator(".pill", has_text="live").wait_for()
    before = value_of(page, "Restarts")
    os.kill(playground.engine_pid(), signal.SIGKILL)
    seen(page, lambda: value_of(page, "Restarts") == before + 1, "the restart")
    answered = load.num_answers
    wait_until(lambda: load.num_answers > answered, "an answer of the new engine")
    seen(page, lambda: value_of(page, "Running") > 0, "running requests")


def test_a_view_that_is_paused_or_left_watches_nothing(open_page: OpenPage, playground: Server) -> None:
    def is_stream(request: Request) -> bool:
        return request.url.endswith("/live")

    page = open_page("/#/live")
    page.locator(".pill", has_text="live").wait_for()
    with page.expect_event("requestfailed", is_stream):
        page.get_by_role("button", name="Pause").click()
    page.locator(".pill", has_text="paused").wait_for()
    with page.expect_request(playground.url + "/live"):
        page.get_by_role("button", name="Go on").click()
    page.locator(".pill", has_text="live").wait_for()
    with page.expect_event("requestfailed", is_stream):
        page.get_by_role("link", name="Chat", exact=True).click()


def test_a_wrong_key_asks_for_another(open_page: OpenPage) -> None:
    page = open_page("/#/live", key="wrong")
    page.get_by_role("dialog", name="API key").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    page.locator(".pill", has_text="live").wait_for()


def test_it_fits_a_phone(open_page: OpenPage, load: Load) -> None:
    page = open_page("/#/live", size=PHONE)
    page.get_by_test_id("kv-map").get_by_role("img").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_screenshot_of_the_live_view(open_page: OpenPage, load: Load, shoot: Callable[[Page, str], None]) -> None:  # noqa: F811
    page = open_page("/#/live", size={"width": 1280, "height": 1600})
    rows = page.get_by_test_id("requests").locator("tbody tr")
    bars = rows.get_by_role("img")
    wanted = 26 if os.environ.get("SCREENSHOTS") else 8
    seen(page, lambda: rows.count() > wanted and described(bars, "encode .*denoise"), f"{wanted} requests")
    shoot(page, "live")
