"""Images under way: what they hold, and whose denoise steps come next.

In a step that has tokens too, images come after the decodes and before the prompts, and pay for what they take: every
step gives them a credit, and while it is not used up they go on. An image's step cannot be divided, so the first one
may overdraw the credit; the debt is paid off by the steps that follow.

Let C be the most that a denoise step costs, and `room` what decodes leave of the step's budget. Then

- a step that decodes has denoise steps of at most max(max_mixed_denoise, C) tokens beside it, and any n such steps in
  a row have at most n * max_mixed_denoise + C;
- while prompts wait as well, images take no more than half of the room over time, plus C;
- the first of the images (by priority, by tenant, by arrival) makes a step at least every C / credit + 1 steps in
  which there is room for it; the credit is the room, half of it while prompts wait, and no more than max_mixed_denoise
  beside decodes;
- an image for which the decodes leave no room gets a step without tokens, after it has waited for PATIENCE of them. So
  decodes lose at most one step of PATIENCE + 1.

What nobody else wanted of a step without decodes is theirs, and free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from weft.plan import ImageLimits
from weft.scheduler.cursors import DenoiseCursor
from weft.scheduler.prompt_embeds import Texts, sources_of
from weft.types import Request


class Holdings:
    def __init__(self, limits: ImageLimits | None) -> None:
        self._limits = limits
        self.free_canvases = list(range(limits.max_num_images - 1, -1, -1)) if limits is not None else []
        self.num_canvases = 0
        """That are taken."""
        self.released: list[int] = []
        """Canvases given back since the last plan: for the worker to forget."""
        self.texts = Texts(limits.max_num_texts if limits is not None else 0)
        self.given_bytes = 0
        """Of tensors."""

    @property
    def num_bytes(self) -> int:
        if self._limits is None:
            return 0
        slots = self.num_canvases * self._limits.canvas_bytes + self.texts.num_used * self._limits.text_bytes
        return slots + self.given_bytes

    def has_room_for(self, request: Request) -> bool:
        """Whether an image can be admitted."""
        if self._limits is None or not self.free_canvases:
            return False
        num_texts = sum(source is not None for source in sources_of(request))
        has_bytes = self.given_bytes + request.given.num_bytes <= self._limits.max_given_bytes
        return has_bytes and num_texts <= len(self.texts.unused)

    def take(self, cursor: DenoiseCursor) -> None:
        """All at once, so that no two images wait for what the other holds."""
        cursor.slot = self.free_canvases.pop()
        self.num_canvases += 1
        prompt, negative = sources_of(cursor.request)
        cursor.texts = self.texts.take(prompt), self.texts.take(negative)
        self.given_bytes += cursor.request.given.num_bytes

    def give_back(self, cursor: DenoiseCursor) -> None:
        self.free_canvases.append(cursor.slot)
        self.released.append(cursor.slot)
        cursor.slot = -1
        self.num_canvases -= 1
        for text in filter(None, cursor.texts):
            self.texts.give_back(text)
        cursor.texts = None, None
        self.given_bytes -= cursor.request.given.num_bytes


PATIENCE = 3


class Images:
    """All images that have not ended. Those that wait, or encode one of their prompts, are cursors like any other;
    while others encode for them they stand `aside`, and once there are texts they are `drawing`."""

    def __init__(self, limits: ImageLimits | None) -> None:
        self.holdings = Holdings(limits)
        self.draws_whole = limits is not None and limits.whole_images
        """All that is left of an image at once."""
        self.draws_singly = limits is not None and limits.single_images
        self.drawing: list[DenoiseCursor] = []
        self.aside: list[DenoiseCursor] = []
        self.num_open = 0
        self._credit = 0
        """In tokens; below 0 it is a debt."""
        self._waited = 0
        """Steps in a row in which tokens left no room for the first in turn."""

    def take_ready(self) -> list[DenoiseCursor]:
        """Take out those that need not stand aside any longer: a text is whole, or nobody encodes it any more."""
        ready = [cursor for cursor in self.aside if not cursor.is_held_up]
        for cursor in ready:
            self.aside.remove(cursor)
        return ready

    def remove(self, cursor: DenoiseCursor) -> None:
        (self.drawing if cursor in self.drawing else self.aside).remove(cursor)

    @property
    def must_go_alone(self) -> bool:
        return self._waited >= PATIENCE and any(cursor.todo for cursor in self.drawing)

    def in_turn(self, served: Callable[[str], int], planned: Collection[DenoiseCursor] = ()) -> list[DenoiseCursor]:
        """Those that could make a step and are not planned yet, the first in turn first. `served` says how much a
        tenant has had."""
        able = [cursor for cursor in self.drawing if cursor.todo and cursor not in planned]
        return sorted(able, key=lambda cursor: (cursor.priority, served(cursor.tenant), cursor.arrival))

    def share(
        self, in_turn: list[DenoiseCursor], room: int, most: int, *, is_alone: bool, credit: int
    ) -> list[DenoiseCursor]:
        """Who makes a step that tokens want a share of, too, and gives images so much credit."""
        self._credit = min(credit, self._credit + credit)
        has_room = bool(in_turn) and _fits(in_turn[0], room, most, is_alone)
        self._waited = self._waited + 1 if in_turn and not has_room else 0
        chosen: list[DenoiseCursor] = []
        for cursor in in_turn:
            is_first = not chosen
            can_pay = self._credit >= cursor.cost or (is_first and self._credit > 0)
            if can_pay and _fits(cursor, room, most - len(chosen), is_alone and is_first):
                chosen.append(cursor)
                room -= cursor.cost
                self._credit -= cursor.cost
        return chosen

    def take(self, in_turn: list[DenoiseCursor], room: int, most: int, *, is_alone: bool) -> list[DenoiseCursor]:
        """Who makes a step of which nobody else wants anything more."""
        self._waited = 0
        chosen: list[DenoiseCursor] = []
        for cursor in in_turn:
            if _fits(cursor, room, most - len(chosen), is_alone and not chosen):
                chosen.append(cursor)
                room -= cursor.cost
        return chosen


def _fits(cursor: DenoiseCursor, room: int, most: int, is_alone: bool) -> bool:
    """One that is alone fits whatever it costs: it cannot be divided."""
    return most > 0 and (cursor.cost <= room or is_alone)
