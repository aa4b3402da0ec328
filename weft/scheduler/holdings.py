"""What images hold from their admission to their end: a canvas each, texts that they may share, and tensors that came
from clients. Canvases and texts are slots in the worker; the tensors have what those leave of the bytes for images."""

from __future__ import annotations

from weft.plan import ImageLimits
from weft.scheduler.cursors import DenoiseCursor
from weft.scheduler.texts import Texts, sources_of
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
