"""Everything that training needs, made ahead into one folder: masks, prompts, and the language model's states.

    python -m training.shapes.prepare build/shapes

Training and judging then need neither Pillow nor the language model.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from training.shapes.data import PICTURES, EncodedPrompts, Mask, Prompt, Scene, held_out_prompts, prompts

log = logging.getLogger(__name__)

PHRASINGS_EACH = {"shapes": 4, "glyphs": 2, "counts": 2}
MASKS_EACH = {"shapes": 1500, "glyphs": 500, "counts": 1200}
NUM_JUDGED = 600


class Prepared(Struct, frozen=True):
    masks: NDArray[np.uint8]
    """[pictures of one figure and count after the other, 32, 32]"""
    first_mask: NDArray[np.int64]
    """[pictures + 1]: where the masks of each of PICTURES begin, and where the last one's end."""
    prompts: list[Prompt]
    """Those of training, then those to judge by."""
    num_training: int
    text: EncodedPrompts

    @property
    def held_out(self) -> list[Prompt]:
        return self.prompts[self.num_training :]


def render(masks_each: dict[str, int], seed: int) -> tuple[Mask, NDArray[np.int64]]:
    from training.shapes.draw import draw

    masks: list[Mask] = []
    first = [0]
    for figure, count in PICTURES:
        number = masks_each[Scene(figure, "red", count=count).category]
        masks += [draw(figure, count, f"{seed} {i}") for i in range(number)]
        first.append(len(masks))
    return np.stack(masks), np.array(first)


def write(folder: Path, prepared: Prepared) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "masks.npz", masks=prepared.masks, first=prepared.first_mask)
    text = prepared.text
    np.savez(folder / "text.npz", states=text.states, places=text.places, lengths=text.lengths)
    (folder / "prompts.json").write_bytes(msgspec.json.encode((prepared.num_training, prepared.prompts)))


def read(folder: Path) -> Prepared:
    with np.load(folder / "masks.npz") as masks, np.load(folder / "text.npz") as text:
        num_training, asked = msgspec.json.decode((folder / "prompts.json").read_bytes(), type=tuple[int, list[Prompt]])
        encoded = EncodedPrompts(text["states"], text["places"], text["lengths"])
        return Prepared(masks["masks"], masks["first"], asked, num_training, encoded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    from training.shapes.text import TextEncoder

    masks, first = render(MASKS_EACH, options.seed)
    log.info("%d masks", len(masks))
    training = prompts(held_out=False, phrasings_each=PHRASINGS_EACH)
    asked = training + held_out_prompts(NUM_JUDGED)
    log.info("%d prompts of training, %d to judge by", len(training), NUM_JUDGED)
    text = TextEncoder().encode([prompt.text for prompt in asked])
    write(options.folder, Prepared(masks, first, asked, len(training), text))
    log.info("%d states of the language model", len(text.states))


if __name__ == "__main__":
    main()
