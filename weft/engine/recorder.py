"""What the engine spends its time on, recorded with torch's profiler between two words of the operator's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from weft.errors import InvalidRequest


class Recorder:
    def __init__(self) -> None:
        self._profile: profile | None = None
        self._file = Path()

    def start(self, folder: str) -> str:
        """Begin, and return the file that the trace will be in. Raises InvalidRequest when one is being recorded, or
        when the folder cannot be written to."""
        if self._profile is not None:
            raise InvalidRequest("A trace is being recorded already.")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"There can be no traces in the folder: {error.strerror}.") from error
        self._file = Path(folder) / f"weft-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        return str(self._file)

    def stop(self) -> str:
        """End, write the trace, and return its file. Raises InvalidRequest when none is being recorded."""
        if self._profile is None:
            raise InvalidRequest("No trace is being recorded.")
        ended, self._profile = self._profile, None
        ended.stop()
        ended.export_chrome_trace(str(self._file))
        return str(self._file)
