"""The messages between the api process and an engine process, and their frames on a unix socket.

A frame is a length (4 bytes, little endian) and a msgpack message: no pickle, no code, nothing but data.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from weft.checkpoint.model_files import ModelFiles
from weft.engine_stats import EngineStats
from weft.options import Config
from weft.types import Event, ModelInfo, ReadBlocks, Request, ResetPrefixCache, StartProfile, StopProfile

MAX_FRAME_BYTES = 256 * 2**20
LARGE_BYTES = 2**20
_LENGTH = struct.Struct("<I")

M = TypeVar("M")


class RankPlace(Struct, frozen=True):
    """The place of a rank in its engine, and where it finds the others."""

    rank: int
    size: int
    store_port: int
    """The port of the store, on the loopback interface."""
    plans: str
    """The file of the memory to which the first rank writes its plans."""


class Start(Struct, frozen=True, tag=True):
    """The first message to an engine."""

    config: Config
    files: ModelFiles
    publishes_digests: bool = False
    """True: the engine tells what its prefix cache holds."""
    rank: RankPlace | None = None
    """Set for the ranks that an engine starts; None for the engine itself, their first rank."""


class Vocabulary(Struct, frozen=True, tag=True):
    """The vocabulary of the tokenizer, which is sent before the first request that has a grammar."""

    tokens: list[bytes]
    """The bytes of every token by its id; empty for an id without a token."""
    special_ids: list[int]
    """Tokens that no text is made of."""
    eos_token_ids: list[int]


class Submit(Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(Struct, frozen=True, tag=True):
    request_ids: list[str]


class Shutdown(Struct, frozen=True, tag=True):
    pass


ProcessControl = ResetPrefixCache | StartProfile | StopProfile | ReadBlocks
"""The control messages that an engine process carries out; adapters are the api process's to know."""


class ControlCall(Struct, frozen=True, tag=True):
    """A control message on its way to the engine process, which answers it with one `Done`."""

    number: int
    """The number that names the call in its answer."""
    message: ProcessControl


ToEngine = Start | Vocabulary | Submit | Abort | Shutdown | ControlCall


class Ready(Struct, frozen=True, tag=True):
    model: ModelInfo
    stats: EngineStats = EngineStats(prepared=False)


class Failed(Struct, frozen=True, tag=True):
    """The engine cannot go on. `kind` is the name of an error class, of Weft's or of another's."""

    kind: str
    message: str
    hint: str = ""
    from_outside: bool = False
    """True when another process ended or stopped a part of it, which no request can have caused."""


class Started(Struct, frozen=True, tag=True):
    """The message that these requests are in the step that begins now: if the engine dies of it, one may be why."""

    request_ids: list[str]
    stats: EngineStats | None = None
    """How the engine stands now; None: it does not say."""


class StepOutput(Struct, frozen=True, tag=True):
    """The outputs of one step."""

    tokens: dict[str, int]
    """The token of every request to which the step brought one token and nothing else, by request id."""
    events: list[Event]
    """The events of all other requests."""
    stats: EngineStats


class Heartbeat(Struct, frozen=True, tag=True):
    """The heartbeat, which is sent every second, whatever the engine does."""

    step_seconds: float
    """Seconds that the step under way has taken so far; 0 between steps."""


class Done(Struct, frozen=True, tag=True):
    """The answer to a control call."""

    number: int
    result: str = ""
    error: str = ""
    """The reason why it could not be done; empty: it was."""


class PrefixDigests(Struct, frozen=True, tag=True):
    """The message that tells what has changed in the prefix cache since the last one, as digests of blocks
    (`scheduler/prefix_digests`)."""

    reset: bool
    """True: nothing that was told before holds."""
    added: list[bytes] = []
    removed: list[bytes] = []


FromEngine = Ready | Failed | Started | StepOutput | Heartbeat | Done | PrefixDigests


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _from_plain(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{kind.__name__} cannot be received")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_from_plain)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class BrokenFrame(Exception):
    """The other side sent something that is no message."""


def frame(message: Struct) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def write_frame(transport: asyncio.WriteTransport, message: Struct) -> None:
    """Write a message. A large one, which has tensors, is not copied once more to stand behind its
    length."""
    body = _encoder.encode(message)
    if len(body) < LARGE_BYTES:
        transport.write(_LENGTH.pack(len(body)) + body)
    else:
        transport.write(_LENGTH.pack(len(body)))
        transport.write(body)


def receive(sock: socket.socket) -> ToEngine | None:
    """Wait for the next message, on the engine's side; None when the api process is gone."""
    head = _receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(sock, _length(head))
    if body is None:
        return None
    return decoded(_to_engine, body)


def receive_from_rank(sock: socket.socket) -> FromEngine | None:
    """Wait for the next message of a rank, on the side of the first one; None when it is gone. Raises TimeoutError
    where the socket has a timeout."""
    head = _receive_exactly(sock, _LENGTH.size)
    body = None if head is None else _receive_exactly(sock, _length(head))
    return None if body is None else decoded(_from_engine, body)


async def receive_from(reader: asyncio.StreamReader) -> ToEngine | None:
    """Wait for the next message, for an engine on an event loop."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_length(head))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decoded(_to_engine, body)


class FrameReader(asyncio.Protocol):
    """The receiving end of a socket on an event loop: the bodies of frames, for one reader."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._ended = False
        self._arrival: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool | None] | None = None

    async def body(self) -> bytes | None:
        """Wait for the next frame, and return its body; None when the other side is gone."""
        while (body := self._next_body()) is None:
            if self._ended:
                return None
            await self._more()
        return body

    async def follow(self, take: Callable[[bytes], bool | None]) -> None:
        """Give the body of every frame to `take` as it arrives, with no turn of the loop between, until the other side
        is gone or `take` returns True. Raises BrokenFrame, and what `take` raises."""
        self._take = take
        try:
            self._hand_out()
            while self._take is not None and not self._ended:
                await self._more()
        finally:
            self._take = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._take is None:
            self._ring()
            return
        try:
            self._hand_out()
        except Exception as error:  # noqa: BLE001 - raised again by `follow`
            self._take = None
            if self._arrival is not None and not self._arrival.done():
                self._arrival.set_exception(error)

    def _hand_out(self) -> None:
        while self._take is not None and (body := self._next_body()) is not None:
            if self._take(body):
                self._take = None
                self._ring()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._ring()

    async def _more(self) -> None:
        self._arrival = asyncio.get_running_loop().create_future()
        await self._arrival

    def _ring(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _next_body(self) -> bytes | None:
        """Return the body of the first frame, once all of it has come."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _length(self._received[: _LENGTH.size])
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body


class Inbox(FrameReader):
    """The api process's side of the socket: the messages of the engine."""

    async def read(self) -> FromEngine | None:
        """Wait for the next message; None when the engine is gone."""
        body = await self.body()
        return None if body is None else decoded(_from_engine, body)

    async def follow_messages(self, take: Callable[[FromEngine], bool | None]) -> None:
        """Give every message to `take` as it arrives (`follow`)."""
        await self.follow(lambda body: take(decoded(_from_engine, body)))


def _length(head: bytes | bytearray) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
    return length


def decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    """Return the message of a frame's body. Raises BrokenFrame."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BrokenFrame(str(error)) from error


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        except OSError:
            if sock.fileno() == -1:  # closed at this end, between two reads
                return None
            raise
        if not part:
            return None
        parts += part
    return bytes(parts)


log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        """The messages that came; None when no more will come."""
        self.closed = threading.Event()
        self.step_began = 0.0
        """The time when the step under way began (monotonic); 0 between steps."""
        for work in (self._read_forever, self._send_heartbeats):
            threading.Thread(target=work, name="weft-engine-channel", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        try:
            with self._lock:
                self._sock.sendall(frame(message))
        except OSError:
            self.closed.set()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self.closed.set()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("The socket was closed already: %s", error)

    def _read_forever(self) -> None:
        try:
            while (message := receive(self._sock)) is not None:
                self.inbox.put(message)
        except BrokenFrame as error:
            log.error("The api process sent what is no message: %s", error)
        self.closed.set()
        self.inbox.put(None)

    def _send_heartbeats(self) -> None:
        while not self.closed.wait(HEARTBEAT_SECONDS):
            began = self.step_began
            self.send(Heartbeat(time.monotonic() - began if began else 0.0))
