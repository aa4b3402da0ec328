"""A browser, and the server whose page it looks at."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.server import Server
from tests.waiting import PATIENCE
from weft.checkpoint.model_files import ModelFiles

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, WebError

KEY = "sesame"
PATIENCE_MS = 1000 * PATIENCE
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium: that of CHROMIUM, or the first that the machine has. tools/chromium.sh installs one. It ends
    with this folder's tests: while it runs, its thread has an event loop, and others could start none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium: tools/chromium.sh installs it, or CHROMIUM names it")
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not give; it sees this repository's server alone.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def playground(smollm2_files: ModelFiles) -> Iterator[Server]:
    """A server of the default model that wants a key. A test may kill its engine, if it waits for the next one."""
    with Server("--tool-style", "hermes", env={"WEFT_API_KEY": KEY}) as server:
        server.key = KEY
        yield server


@pytest.fixture(scope="package")
def tab_of(browser: Browser) -> Callable[[bool], Page]:
    """Returns the tab that all tests use, or that of the tests that touch: a new one costs a second of a core."""

    @functools.cache
    def tab(has_touch: bool) -> Page:
        context = browser.new_context(reduced_motion="reduce", device_scale_factor=1, has_touch=has_touch)
        context.set_default_timeout(PATIENCE_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        return context.new_page()

    return tab


QUIET = "/health/live"
"""A document of every server that has no script: where a tab goes there, what it did ends."""
FORGET = """async () => {
    localStorage.clear();
    sessionStorage.clear();
    for (const {name} of await indexedDB.databases())
        await new Promise((resolve, reject) => {
            Object.assign(indexedDB.deleteDatabase(name), {onsuccess: resolve, onerror: reject});
        });
}"""
REMEMBER = """if (origin !== 'null')
    for (const [store, items] of Object.entries(%s)) Object.assign(self[store], items);"""
"""A new tab's empty document has no storage."""


@pytest.fixture
def open_page(tab_of: Callable[[bool], Page], playground: Server) -> Iterator[Callable[..., Page]]:
    """Opens the page in a browser that has forgotten all of it; its key is known unless `key` is empty, and the chat
    has the settings, as if the user had chosen them. No tab may tell of an error that it did not expect, nor speak to
    another server."""
    server, troubles, used, chosen = playground.url, [], [], ExitStack()

    def watch(request: Request) -> None:
        if not request.url.startswith((server + "/", "data:", "blob:")) or KEY in request.url:
            troubles.append(f"the page asked for {request.url:.200}")

    def complain(error: WebError) -> None:
        troubles.append(str(error.error))

    def open_one(
        path: str = "/",
        key: str = KEY,
        dark: bool = False,
        size: dict[str, int] = DESKTOP,
        url: str = playground.url,
        **settings: Any,
    ) -> Page:
        nonlocal server
        page, server = tab_of(size is PHONE), url
        context = page.context
        if page not in used:
            used.append(page)
            context.on("request", watch)
            context.on("weberror", complain)
        chosen.close()
        if page.url != url + QUIET:
            page.goto(url + QUIET)
        page.evaluate(FORGET)
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.emulate_media(color_scheme="dark" if dark else "light")
        known = {
            "sessionStorage": {"weft.key": key} if key else {},
            "localStorage": {"weft.settings": json.dumps(settings)} if settings else {},
        }
        chosen.enter_context(context.add_init_script(REMEMBER % json.dumps(known)))
        page.goto(url + path)
        return page

    yield open_one
    chosen.close()
    server = playground.url
    for page in used:
        for other in page.context.pages[1:]:
            other.close()
        page.unroute_all()
        page.mouse.move(0, 0)
        page.goto(server + QUIET)
        page.context.remove_listener("request", watch)
        page.context.remove_listener("weberror", complain)
    assert not troubles, troubles
