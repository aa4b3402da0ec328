"""How a generation's end reads at a door: an answer, or an error."""

from __future__ import annotations

from weft.errors import EngineFault, Overloaded, RequestTimeout, Unavailable, WeftError
from weft.types import Delta, FinishReason


def failure_of(delta: Delta) -> WeftError | None:
    """The error that a request's last delta stands for; None for an answer that ended as it should."""
    match delta.finish:
        case None | FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return RequestTimeout(delta.error or "The request took too long and was ended.")
        case FinishReason.REJECTED:
            return Overloaded(delta.error or "The queue is full.")
        case FinishReason.ABORT:
            return Unavailable(delta.error or "The server ended the request.")
        case FinishReason.ERROR:
            return EngineFault(delta.error or "The engine failed while it worked on this request.")
