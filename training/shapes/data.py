"""What the model learns to draw: coloured figures on coloured backgrounds, and the prompts that ask for them.

A figure's picture is a mask of coverage, so that a mask can be given any two colours. A scene (figure, colours, count)
is held out of training by a hash of what it combines, and with it every prompt that asks for it.
"""

from __future__ import annotations

import hashlib
import random
from itertools import cycle, islice

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

SIZE = 32
COLOURS = {
    "red": (220, 30, 40),
    "orange": (250, 130, 20),
    "yellow": (250, 220, 40),
    "green": (30, 150, 60),
    "cyan": (60, 210, 220),
    "blue": (35, 70, 215),
    "purple": (130, 50, 180),
    "pink": (250, 150, 195),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)
COLOUR_NAMES = list(COLOURS)
SHAPES = ["circle", "square", "triangle", "star", "ring", "cross", "diamond", "heart"]
DIGITS = list("0123456789")
LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
FIGURES = SHAPES + DIGITS + LETTERS
NUMBERS = {2: "two", 3: "three"}
PICTURES = [(figure, 1) for figure in FIGURES] + [(shape, count) for count in NUMBERS for shape in SHAPES]
"""Every figure, alone or several times: what masks are made of."""
HELD_OUT_PERCENT = 15

Mask = NDArray[np.uint8]
Image = NDArray[np.uint8]


class Scene(Struct, frozen=True):
    """What an image shows. Where the prompt does not name the background, it may be any."""

    figure: str
    colour: str
    background: str | None = None
    count: int = 1

    @property
    def category(self) -> str:
        if self.figure not in SHAPES:
            return "glyphs"
        return "shapes" if self.count == 1 else "counts"

    @property
    def is_held_out(self) -> bool:
        """Whether this combination is for judging only: figure, colour and background of a single shape; figure,
        count and colour, on whatever background, of the others."""
        if self.category == "shapes":
            key = f"{self.figure} {self.colour} {self.background}"
            return self.background is not None and _hash(key) % 100 < HELD_OUT_PERCENT
        return _hash(f"{self.count} {self.figure} {self.colour}") % 100 < HELD_OUT_PERCENT

    def backgrounds(self) -> list[str]:
        """Which backgrounds images of this scene may have in training."""
        if self.background is not None:
            return [self.background]
        others = [Scene(self.figure, self.colour, name, self.count) for name in COLOURS if name != self.colour]
        return [scene.background for scene in others if scene.background and scene.is_held_out == self.is_held_out]


class Prompt(Struct, frozen=True):
    text: str
    scene: Scene


class EncodedPrompts(Struct, frozen=True):
    """A language model's states of prompts. A state is kept once, however many prompts begin alike."""

    states: NDArray[np.float16]
    """[beginnings, width]"""
    places: NDArray[np.int32]
    """[prompts, longest]: where each token's state stands among them; 0 behind a prompt's end."""
    lengths: NDArray[np.int32]


# c, b: the colours; f: the shape; g: the glyph; n: the number. {c:a} and {c:A} write the article before the word.
_PHRASES = {
    ("shapes", True): [
        "{c:a} {f} on {b:a} background",
        "{c:a} {f} on {b}",
        "{c} {f} on {b} background",
        "draw {c:a} {f} on {b:a} background",
        "an image of {c:a} {f} on {b:a} background",
        "{f:a} in {c} on {b:a} background",
        "{c:A} {f} on {b:a} background.",
        "{b:a} background with {c:a} {f}",
        "{c} {f}, {b} background",
    ],
    ("shapes", False): [
        "{c:a} {f}",
        "{c} {f}",
        "{c:A} {f}.",
        "draw {c:a} {f}",
        "a picture of {c:a} {f}",
        "{f:a} in {c}",
        "one {c} {f}",
    ],
    ("counts", True): [
        "{n} {c} {f} on {b:a} background",
        "{n} {c} {f} on {b}",
        "draw {n} {c} {f} on {b:a} background",
        "an image of {n} {c} {f} on {b:a} background",
        "{n} {c} {f}, {b} background",
        "{b:a} background with {n} {c} {f}",
    ],
    ("counts", False): [
        "{n} {c} {f}",
        "{N} {c} {f}.",
        "draw {n} {c} {f}",
        "a picture of {n} {c} {f}",
        "{n} {f} in {c}",
    ],
    ("glyphs", True): [
        "the {kind} {g} in {c} on {b:a} background",
        "{c:a} {kind} {g} on {b:a} background",
        "the {c} {kind} {g} on {b}",
        "the {kind} {g} in {c} on {b}",
        "{c:a} {g} on {b:a} background",
        "{kind} {g} in {c}, {b} background",
        "{b:a} background with the {kind} {g} in {c}",
    ],
    ("glyphs", False): [
        "the {kind} {g} in {c}",
        "{c:a} {kind} {g}",
        "the {c} {kind} {g}",
        "draw the {kind} {g} in {c}",
        "{c:a} {g}",
        "The {kind} {g} in {c}.",
    ],
}


class _Word(str):
    """A word that writes its article where a phrase asks for it."""

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        article = "an" if self[0] in "aeiou" else "a"
        return f"{article.capitalize() if spec.startswith('A') else article} {self}"


def phrasings(scene: Scene) -> list[str]:
    """Every way in which a prompt asks for a scene."""
    kinds = ["digit", "number"] if scene.figure in DIGITS else ["letter"]
    plural = scene.figure + ("es" if scene.figure.endswith("s") else "s")
    number = NUMBERS.get(scene.count, "")
    texts = [
        phrase.format(
            c=_Word(scene.colour),
            b=_Word(scene.background or ""),
            f=_Word(plural if scene.count > 1 else scene.figure),
            g=scene.figure,
            kind=kind,
            n=number,
            N=number.capitalize(),
        )
        for phrase in _PHRASES[scene.category, scene.background is not None]
        for kind in kinds
    ]
    return list(dict.fromkeys(texts))


def scenes(*, held_out: bool) -> list[Scene]:
    """All there are, of training or held out of it. A single shape without a background is of training alone: on some
    background it has been seen."""
    found = []
    for figure, count in PICTURES:
        for colour in COLOURS:
            for background in [None, *COLOURS]:
                scene = Scene(figure, colour, background, count)
                if background != colour and scene.is_held_out == held_out:
                    found.append(scene)
    return found


def prompts(*, held_out: bool, phrasings_each: dict[str, int]) -> list[Prompt]:
    """So many phrasings of every scene, by its category, each scene beginning elsewhere among them; all of those that
    name no background."""
    found = []
    for scene in scenes(held_out=held_out):
        texts = phrasings(scene)
        start = _hash(f"{scene.count} {scene.figure} {scene.colour} {scene.background}") % len(texts)
        wanted = len(texts) if scene.background is None else phrasings_each[scene.category]
        found += [Prompt(text, scene) for text in (texts[start:] + texts[:start])[:wanted]]
    return found


def held_out_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """For judging: the categories in turn, drawn without repetition."""
    drawing = random.Random(f"held out {seed}")
    by_category: dict[str, list[Prompt]] = {"shapes": [], "glyphs": [], "counts": []}
    every_phrase = dict.fromkeys(by_category, 100)
    for prompt in prompts(held_out=True, phrasings_each=every_phrase):
        by_category[prompt.scene.category].append(prompt)
    for choices in by_category.values():
        drawing.shuffle(choices)
    return [by_category[category].pop() for category in islice(cycle(by_category), count)]


def compose(mask: Mask, colour: str, background: str) -> Image:
    """[32, 32, 3]: the figure of a mask in its colour before the background."""
    cover = mask.astype(np.float32)[..., None] / 255
    front, back = PALETTE[COLOUR_NAMES.index(colour)], PALETTE[COLOUR_NAMES.index(background)]
    image: Image = np.rint(back + cover * (front - back)).astype(np.uint8)
    return image


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
