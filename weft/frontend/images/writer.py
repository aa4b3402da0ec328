"""Images as they are written: all in one answer, or as a stream of events."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping

import msgspec

from weft.frontend.images.answers import (
    CompletedImage,
    DrawnImage,
    ImageProgress,
    ImagesAnswer,
    PartialImage,
    images_usage,
)
from weft.frontend.images.drawing import Finished, Step
from weft.frontend.images.job import ImageJob
from weft.frontend.sse import named_event


class ImagesWriter:
    def __init__(self, job: ImageJob) -> None:
        first = job.images[0]
        self._job = job
        self._size = f"{first.width}x{first.height}"
        self._created = int(time.time())
        self._num_partial = [0] * len(job.images)

    def events(self, index: int, news: Step | Finished) -> bytes:
        """Every step is told of; behind it stands the image as it is then, where there is one."""
        steps = self._job.images[index].steps
        step = news.number if isinstance(news, Step) else steps
        events = _event(ImageProgress(index=index, step=step, steps=steps))
        if isinstance(news, Finished):
            return events + _event(self._completed(index, news))
        return events if news.preview is None else events + _event(self._partial(index, news.preview))

    def whole(self, finished: Mapping[int, Finished]) -> bytes:
        data = [
            DrawnImage(b64_json=_base64(finished[index].png), seed=params.seed)
            for index, params in enumerate(self._job.images)
        ]
        usage = images_usage([each.usage for each in finished.values()])
        return msgspec.json.encode(ImagesAnswer(created=self._created, data=data, size=self._size, usage=usage))

    def _partial(self, index: int, preview: bytes) -> PartialImage:
        number = self._num_partial[index]
        self._num_partial[index] += 1
        return PartialImage(
            index=index,
            b64_json=_base64(preview),
            created_at=int(time.time()),
            size=self._size,
            partial_image_index=number,
        )

    def _completed(self, index: int, finished: Finished) -> CompletedImage:
        return CompletedImage(
            index=index,
            b64_json=_base64(finished.png),
            created_at=int(time.time()),
            size=self._size,
            seed=self._job.images[index].seed,
            usage=images_usage([finished.usage]),
        )


def _event(body: ImageProgress | PartialImage | CompletedImage) -> bytes:
    return named_event(body.type, body)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
