"""The model of a configuration, found and fetched the same way for every engine."""

from __future__ import annotations

from pathlib import Path

from weft.config import Config
from weft.hub.files import ModelFiles, dummy_files
from weft.hub.progress import Progress, Report, unheard
from weft.hub.resolve import resolve


def find_model(config: Config, report: Report = unheard) -> ModelFiles:
    """The files of the model that a configuration names, pulled if need be, whole and checked.

    `report` hears of every stage, in the thread that calls this. A download of which nothing comes for STALL_SECONDS
    ends with a ModelError. Python files come along where the operator trusts them.
    """
    report(Progress("resolve", note=config.model.model))
    if config.model.load_format == "dummy":
        return dummy_files(Path(config.model.model))
    return resolve(config.model.model, config.model.revision, report=report, with_code=config.backend.trust_remote_code)
