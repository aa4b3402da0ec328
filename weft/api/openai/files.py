"""/v1/files: files of clients, sent as a form that is written to disk as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser

from fastapi import Response
from fastapi.responses import FileResponse
from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from weft import logs
from weft.api.error_responses import BodyTooLarge, BodyTooSlow, JsonResponse, UploadRefused, WrongContentType
from weft.api.paging import limit_of, page_after
from weft.errors import InvalidRequest
from weft.serving.admission import Admission, ClientGone
from weft.serving.data_store import TTL_S, DataStore, FileRecord, NewFile

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
MIN_TTL_S = 3600
UPLOAD_SECONDS = 3600.0
"""A client must have sent all of a file by then."""
MAX_FORM_BYTES = 64 * 1024
"""What a form may have besides the file."""
MAX_HEAD_BYTES = 8 * 1024
MAX_VALUE_BYTES = 1024
MAX_PARTS = 8
MAX_NAME_CHARS = 255
MAX_LISTED = 10_000


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


class PartHead(Struct, frozen=True):
    """The beginning of a part of a form."""

    name: str
    filename: str | None
    """None: a plain value."""


class FormReader:
    """Takes a form (multipart/form-data) apart as it comes, and holds no more of it than the end of what came."""

    def __init__(self, content_type: str) -> None:
        """Raises WrongContentType."""
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary()
        if message.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > 200:
            raise WrongContentType("A file is sent as a form: multipart/form-data with a boundary.")
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        # The first delimiter has no line before it.
        self._buffer = bytearray(b"\r\n")
        self._state = self._preamble
        self._num_parts = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[PartHead | bytes]:
        """Yield the heads of parts, and what is in them in pieces."""
        self._buffer += data
        while (found := self._state()) is not None:
            if found != b"":
                yield found

    # A state returns what it has found, empty where only the state has changed, and None where it needs more.

    def _preamble(self) -> PartHead | bytes | None:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise UploadRefused("The form does not begin with its boundary.")
            return None
        del self._buffer[: at + len(self._delimiter)]
        self._state = self._head
        return b""

    def _head(self) -> PartHead | bytes | None:
        if self._buffer.startswith(b"--"):
            self.ended = True
            self._state = self._epilogue
            return b""
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0 or at > MAX_HEAD_BYTES:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise UploadRefused(f"The head of a part of the form has more than {MAX_HEAD_BYTES} bytes.")
            return None
        head = HeaderParser().parsestr(self._buffer[:at].decode("utf-8", "replace").lstrip())
        name = head.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise UploadRefused("A part of the form has no name.")
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise UploadRefused(f"The form has more than {MAX_PARTS} parts.")
        del self._buffer[: at + 4]
        self._state = self._body
        filename = head.get_filename()
        return PartHead(name, None if filename is None else filename[:MAX_NAME_CHARS])

    def _body(self) -> PartHead | bytes | None:
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        piece = bytes(self._buffer[:end])
        if at >= 0:
            del self._buffer[: at + len(self._delimiter)]
            self._state = self._head
            return piece
        del self._buffer[:end]
        return piece or None

    def _epilogue(self) -> PartHead | bytes | None:
        self._buffer.clear()
        return None


class UploadHandler(Response):
    """POST /v1/files: a response that writes the file while the form comes."""

    def __init__(self, admission: Admission, store: DataStore) -> None:
        super().__init__()
        self._admission = admission
        self._store = store
        self._limit_mb = admission.config.limits.max_file_mb

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        with self._admission.admit(receive) as context:
            form = FormReader(headers.get(b"content-type", b"").decode("latin-1"))
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > (self._limit_mb << 20) + MAX_FORM_BYTES:
                raise self._too_large()
            new = await self._store.new_file(context.tenant)
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    record = await self._written(form, receive, new)
            except ClientGone:
                return
            except TimeoutError:
                raise BodyTooSlow(f"The file was not complete after {UPLOAD_SECONDS:g} s.") from None
            finally:
                await new.close()
        await JsonResponse(file_object(record))(scope, receive, send)

    async def _written(self, form: FormReader, receive: Receive, new: NewFile) -> FileRecord:
        values: dict[str, bytearray] = {}
        filename: str | None = None
        part: bytearray | None = None
        """The value that is being read; None: it is the file."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            for found in form.feed(message.get("body", b"")):
                match found:
                    case PartHead("file", str(name)) if filename is None:
                        filename, part = name, None
                    case PartHead("file"):
                        raise UploadRefused("The form has no file of this name, or two.", param="file")
                    case PartHead(name):
                        part = values.setdefault(name, bytearray())
                    case bytes() if part is not None:
                        part += found
                        if len(part) > MAX_VALUE_BYTES:
                            raise UploadRefused(f"A value of the form has more than {MAX_VALUE_BYTES} bytes.")
                    case bytes():
                        if new.num_bytes + len(found) > self._limit_mb << 20:
                            raise self._too_large()
                        await new.write(found)
        if not form.ended:
            raise UploadRefused("The form ends before its last boundary.")
        if filename is None:
            raise UploadRefused("The form has no file.", param="file")
        texts = {name: value.decode("utf-8", "replace") for name, value in values.items()}
        purpose, ttl_s = form_values(texts)
        return await new.keep(filename, purpose, ttl_s)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"The file is larger than {self._limit_mb} MiB.", hint="The operator's setting is --max-file-mb."
        )


def form_values(values: dict[str, str]) -> tuple[str, int]:
    """Return the purpose of a file, and how long it is kept. Raises UploadRefused for what is wrong, or unknown."""
    purpose = values.pop("purpose", "")
    if purpose not in PURPOSES:
        raise UploadRefused(f"purpose is {purpose!r:.100}; it must be one of {', '.join(PURPOSES)}.", param="purpose")
    anchor = values.pop("expires_after[anchor]", "created_at")
    seconds = values.pop("expires_after[seconds]", str(TTL_S))
    if values:
        name = next(iter(values))
        raise UploadRefused(f"There is no such field: {name!r:.100}.", param=name[:100])
    if anchor != "created_at" or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise UploadRefused("expires_after has the anchor created_at, and seconds.", param="expires_after")
    if not MIN_TTL_S <= int(seconds) <= TTL_S:
        raise UploadRefused(f"expires_after.seconds must be from {MIN_TTL_S} to {TTL_S}.", param="expires_after")
    return purpose, int(seconds)


class Files:
    """The files of the tenant that asks."""

    def __init__(self, store: DataStore) -> None:
        self._store = store

    async def listed(self, query: QueryParams) -> FileList:
        await self._store.open()
        purpose = query.get("purpose")
        records = self._store.files(logs.tenant.get())
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order!r:.20}; it must be asc or desc.", param="order")
        if order == "desc":
            records.reverse()
        page, has_more = page_after(
            [record for record in records if purpose in (None, record.purpose)],
            query.get("after"),
            limit_of(query, MAX_LISTED, MAX_LISTED),
        )
        return FileList(
            data=[file_object(record) for record in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=has_more,
        )

    async def found(self, file_id: str) -> FileObject:
        await self._store.open()
        return file_object(self._store.file(logs.tenant.get(), file_id))

    async def content(self, file_id: str) -> Response:
        await self._store.open()
        record = self._store.file(logs.tenant.get(), file_id)
        return FileResponse(self._store.path_of(record), media_type="application/octet-stream")

    async def delete(self, file_id: str) -> DeletedFile:
        await self._store.open()
        await self._store.delete_file(logs.tenant.get(), file_id)
        return DeletedFile(id=file_id)
