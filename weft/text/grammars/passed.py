"""What an output must be, written down as it was asked for: for engines behind which somebody else makes grammars."""

from __future__ import annotations

import msgspec

from weft.errors import InvalidRequest
from weft.text.grammars.specs import OutputSpec


def written_down(spec: OutputSpec, max_kb: int) -> str:
    """For `SamplingParams.grammar`; InvalidRequest when it has more than so many KiB of characters."""
    try:
        text = msgspec.json.encode(spec).decode()
    except RecursionError:
        raise InvalidRequest("The schema is nested too deep.", param=spec.param) from None
    if len(text) > max_kb * 1024:
        raise InvalidRequest(
            f"{spec.param} has {len(text)} characters; at most {max_kb} KiB of them are taken.",
            hint="The server's limit is --max-schema-kb.",
            param=spec.param,
        )
    return text


def read_back(grammar: str) -> OutputSpec:
    """What `written_down` wrote."""
    spec: OutputSpec = msgspec.json.decode(grammar, type=OutputSpec)
    return spec
