"""The kept answers of one owner: what GET and DELETE /v1/responses/{id} and previous_response_id reach."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from weft.errors import InvalidRequest
from weft.frontend.responses.answers import DeletedResponse, InputItemList
from weft.frontend.responses.store import Kept, ResponseStore
from weft.frontend.responses.translation import ChatMessages

MAX_LISTED = 100


class ResponseNotFound(InvalidRequest):
    status = 404
    kind = "response_not_found"


class PreviousNotFound(InvalidRequest):
    kind = "previous_response_not_found"


class Shelf:
    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    def put(self, response_id: str, kept: Kept) -> None:
        self._store.put(self._owner, response_id, kept)

    def messages_of(self, response_id: str) -> ChatMessages:
        """The conversation that a request goes on from."""
        kept = self._store.get(self._owner, response_id)
        if kept is None:
            raise PreviousNotFound(
                f"There is no response {response_id!r:.100}: it was not kept, or not for so long.",
                param="previous_response_id",
            )
        return kept.messages

    def answer(self, response_id: str, query: QueryParams) -> bytes:
        if query.get("stream", "false") != "false":
            raise InvalidRequest("A kept response is not streamed again.", param="stream")
        return self._found(response_id).answer

    def input_items(self, response_id: str, query: QueryParams) -> InputItemList:
        items = self._found(response_id).input_items
        if query.get("order", "desc") != "asc":
            items = items[::-1]
        if after := query.get("after"):
            ids = [item["id"] for item in items]
            items = items[ids.index(after) + 1 :] if after in ids else []
        page = items[: _limit(query)]
        return InputItemList(
            data=page,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=len(page) < len(items),
        )

    def delete(self, response_id: str) -> DeletedResponse:
        if not self._store.delete(self._owner, response_id):
            raise _not_found(response_id)
        return DeletedResponse(id=response_id)

    def _found(self, response_id: str) -> Kept:
        kept = self._store.get(self._owner, response_id)
        if kept is None:
            raise _not_found(response_id)
        return kept


def _limit(query: QueryParams) -> int:
    text = query.get("limit", "20")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= MAX_LISTED):
        raise InvalidRequest(f"limit is {text!r:.20}; it must be from 1 to {MAX_LISTED}.", param="limit")
    return int(text)


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"There is no response {response_id!r:.100}: it was not kept, or not for so long.", param="response_id"
    )
