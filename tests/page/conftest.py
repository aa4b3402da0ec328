"""A browser, and the server whose page it looks at."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.server import Server
from tests.waiting import PATIENCE
from weft.checkpoint.model_files import ModelFiles

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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


@pytest.fixture
def open_page(browser: Browser, playground: Server) -> Iterator[Callable[..., Page]]:
    """Opens a tab of a browser that has seen nothing of the page; its key is known unless `key` is empty, and the chat
    has the settings, as if the user had chosen them. No tab may tell of an error that it did not expect, nor speak to
    another server."""
    contexts, troubles = [], []

    def open_one(
        path: str = "/",
        key: str = KEY,
        dark: bool = False,
        size: dict[str, int] = DESKTOP,
        url: str = playground.url,
        **settings: Any,
    ) -> Page:
        context = browser.new_context(
            viewport=size,  # type: ignore[arg-type]
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            device_scale_factor=1,
            has_touch=size is PHONE,
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        if key:
            context.add_init_script(f"sessionStorage.setItem('weft.key', '{key}')")
        if settings:
            chosen = json.dumps(json.dumps(settings))
            context.add_init_script(f"localStorage.setItem('weft.settings', {chosen})")
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: _check(request.url, url, troubles))
        page.goto(url + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not troubles, troubles


def _check(asked: str, server: str, troubles: list[str]) -> None:
    if not asked.startswith((server + "/", "data:", "blob:")) or KEY in asked:
        troubles.append(f"the page asked for {asked:.200}")
