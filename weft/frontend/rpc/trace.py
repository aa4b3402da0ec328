"""The id that a client gives its work: echoed in what it gets, and in the log where it is fit for it."""

from __future__ import annotations

import re
import uuid

from weft import logs
from weft.errors import InvalidRequest
from weft.frontend.schemas import SANE_ID

MAX_TRACE_ID = 256

_SANE_ID = re.compile(SANE_ID)


def take_up(trace_id: str) -> None:
    """Log under this id from here on; raises InvalidRequest when it is too long."""
    logs.request_id.set(trace_id if _SANE_ID.fullmatch(trace_id) else uuid.uuid4().hex)
    if len(trace_id) > MAX_TRACE_ID:
        raise InvalidRequest(f"The trace_id has {len(trace_id)} characters; at most {MAX_TRACE_ID}.")
