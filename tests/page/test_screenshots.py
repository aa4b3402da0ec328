"""Pictures of the playground. `make screenshots` puts them into docs/images; else little is on them, and they are
thrown away."""

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


def test_screenshot_of_the_token_view(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(
        dark=True,
        hasTokens=True,
        params={"temperature": 0.7, "seed": 3, "max_tokens": 90 if IS_KEPT else 8},
    )
    say(page, RIVERS)
    answer = wait_for_answer(page)
    page.get_by_label("Tokens and their probabilities").click()
    answer.locator(".token.p3, .token.p4" if IS_KEPT else ".token").first.hover()
    answer.get_by_role("status").wait_for()
    shoot(page, "tokens")


def test_screenshot_of_images(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page("/#/images", dark=True)
    for number, prompt in enumerate(PICTURES if IS_KEPT else PICTURES[:1]):
        page.get_by_label("Prompt", exact=True).fill(prompt)
        page.get_by_label("Seed", exact=True).fill(str(number))
        page.get_by_role("button", name="Make the image").click()
        page.get_by_role("button", name=f"Show: {prompt}").wait_for()
        expect_count(page.locator(".drawing"), 0)
    shoot(page, "images")


def test_screenshot_of_a_phone(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(size=PHONE, params={"temperature": 0, "max_tokens": 90 if IS_KEPT else 8})
    say(page, RIVERS)
    wait_for_answer(page)
    shoot(page, "phone")


def test_screenshot_of_two_sides(open_page: OpenPage, shoot: Callable[[Page, str], None]) -> None:
    page = open_page(dark=True, params={"temperature": 0, "max_tokens": 50 if IS_KEPT else 8})
    page.get_by_label("Close the settings").click()
    page.get_by_label("Side by side").click()
    page.get_by_role("button", name="Settings of side B").click()
    page.get_by_label("Temperature", exact=True).fill("0.7")
    page.get_by_label("Seed", exact=True).fill("4")
    page.get_by_label("Close the settings").click()
    say(page, "Describe the sea in two sentences.")
    wait_for_answer(page, 2)
    shoot(page, "sides")
