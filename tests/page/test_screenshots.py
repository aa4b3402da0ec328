"""What the playground shows, and pictures of it. `make screenshots` puts them into docs/images; else little is on
them, and they are thrown away."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.conftest import PHONE
from tests.page.test_playground import expect_count, say, wait_for_answer

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]
MAX_KB = 200
IS_KEPT = bool(os.environ.get("SCREENSHOTS"))

MERGE = "Write a Python function that merges two sorted lists."
RIVERS = "Name three rivers of Europe, as a list."
PICTURES = (
    "a red circle on a blue background",
    "the letter K in green",
    "a yellow triangle on a black background",
    "a white square on a red background",
    "the letter A in orange",
    "a green circle on a white background",
)


@pytest.fixture
def shoot(tmp_path: Path) -> Callable[[Page, str], None]:
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)

    def take(page: Page, name: str) -> None:
        page.screenshot(path=folder / f"playground-{name}.png")
        assert (folder / f"playground-{name}.png").stat().st_size < MAX_KB << 10

    return take


def test_screenshot_of_a_chat(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(params={"temperature": 0, "max_tokens": 200 if IS_KEPT else 8})
    say(page, "What is a prefix cache? One sentence.")
    wait_for_answer(page)
    say(page, MERGE)
    wait_for_answer(page, 2)
    shoot(page, "chat")


def test_the_token_view_tells_probabilities(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(
        dark=True,
        hasTokens=True,
        params={"temperature": 0.7, "seed": 3, "max_tokens": 90 if IS_KEPT else 8},
    )
    say(page, RIVERS)
    answer = wait_for_answer(page)
    page.get_by_label("Tokens and their probabilities").click()
    assert answer.locator(".token").count() > 3
    answer.locator(".token.p3, .token.p4" if IS_KEPT else ".token").first.hover()
    card = answer.get_by_role("status")
    card.wait_for()
    assert "%" in card.inner_text() and card.locator("li").count() == 5
    shoot(page, "tokens")
    answer.locator(".token").first.hover()
    answer.get_by_role("group", name="Tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "token 2 of" in card.inner_text()


def test_screenshot_of_images(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page("/#/images", dark=True)
    for number, prompt in enumerate(PICTURES if IS_KEPT else PICTURES[:1]):
        page.get_by_label("Prompt", exact=True).fill(prompt)
        page.get_by_label("Seed", exact=True).fill(str(number))
        page.get_by_role("button", name="Make the image").click()
        page.get_by_role("button", name=f"Show: {prompt}").wait_for()
        expect_count(page.locator(".drawing"), 0)
    shoot(page, "images")


def test_a_phone_has_it_all(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(size=PHONE, params={"temperature": 0, "max_tokens": 90 if IS_KEPT else 8})
    say(page, RIVERS)
    wait_for_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    shoot(page, "phone")
    page.get_by_label("Settings", exact=True).first.tap()
    page.get_by_role("complementary", name="Settings").wait_for()
    page.get_by_label("Close the settings").tap()
    page.get_by_label("List of chats").tap()
    page.get_by_role("complementary", name="Chats").get_by_text(RIVERS).wait_for()
    for name in ("Images", "Live"):
        page.goto(page.url.partition("#")[0] + f"#/{name.lower()}")
        page.locator(".panel").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_two_sides_answer_with_settings_of_their_own(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(
        dark=True, params={"temperature": 0, "max_tokens": 50 if IS_KEPT else 6, "ignore_eos": not IS_KEPT}
    )
    page.get_by_label("Side by side").click()
    page.get_by_role("radio", name="B").check(force=True)
    page.get_by_label("Close the settings").click()
    page.get_by_role("button", name="Settings of side B").click()
    page.get_by_label("Temperature", exact=True).fill("0.7")
    page.get_by_label("Seed", exact=True).fill("4")
    page.get_by_label("Max tokens", exact=True).fill("50" if IS_KEPT else "3")
    page.get_by_label("Close the settings").click()
    say(page, "Describe the sea in two sentences.")
    wait_for_answer(page, 2)
    shoot(page, "sides")
    stats = [page.get_by_role("region", name=f"Side {side}").locator(".stats").inner_text() for side in "AB"]
    assert IS_KEPT or ("6 tokens" in stats[0] and "3 tokens" in stats[1])
