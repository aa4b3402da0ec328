"""Finding out who answers at an address, and being ready to ask."""

from __future__ import annotations

import asyncio
import logging
import time

from msgspec.structs import replace

from weft.backends.contract import Engine
from weft.backends.model_text import ModelText, open_model_text
from weft.backends.openai_server.chunks import PeerModel, PeerModels, read
from weft.backends.openai_server.http_client import PeerClient, PeerResponse
from weft.backends.openai_server.peer_errors import KEY_REFUSED, PeerLost, error_of
from weft.backends.openai_server.remote_engine import Peer, RemoteEngine
from weft.backends.openai_server.servers import BY_ENGINE, ServerKind, kind_of
from weft.errors import ConfigError, RequestTimeout, Unavailable
from weft.hub.resolve import resolve
from weft.options import Config
from weft.types import ModelInfo

log = logging.getLogger(__name__)

POLL_S = 1.0
"""The pause between two questions while a peer says that it is starting."""


async def start(config: Config) -> Engine:
    """The engine of a peer that answers. Raises ConfigError and Unavailable."""
    options = config.backend
    name = options.engine if options.engine in BY_ENGINE else "remote"
    client = PeerClient(options.engine_url, options.engine_api_key)
    try:
        listed = await _models(client, config.engine.start_timeout_s)
        card = _chosen(listed, options.engine_model, client)
        kind = _kind(name, card, listed.headers.get("server", ""))
        peer = Peer(kind=kind, model=card.id, health_path=await _health_path(client))
        length = _context_length(config, card)
        text = await asyncio.to_thread(_model_text, config)
    except BaseException:
        await client.close()
        raise
    log.info(
        "the remote engine at %s is %s with the model %s, and is given %s",
        client.shown, kind.name, card.id, "text" if text is None else "tokens",
    )  # fmt: skip
    model = ModelInfo(
        name=card.id,
        max_model_len=length,
        logits_width=0 if text is None else text.tokenizer.vocab_size,
        num_blocks=0,
        block_size=0,
        device="remote",
        dtype="",
    )
    return RemoteEngine(name, client, peer, model, text, chunk_size=options.stream_chunk_size)


async def _models(client: PeerClient, patience_s: float) -> PeerResponse:
    """The list of the peer's models. One that is starting is waited for."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            answer = await client.ask("models")
        except (PeerLost, RequestTimeout) as error:
            raise Unavailable(
                f"No server answers at {client.shown}: {error}.", hint="Start it first, or correct --engine-url."
            ) from error
        if answer.status != 503 or time.monotonic() > deadline:
            return answer
        await asyncio.sleep(POLL_S)


def _chosen(listed: PeerResponse, wanted: str, client: PeerClient) -> PeerModel:
    if listed.status in KEY_REFUSED:
        raise ConfigError(f"The server at {client.shown} refuses the key.", hint="Set --engine-api-key.")
    if listed.status == 404 and wanted:
        return PeerModel(wanted)
    if listed.status != 200:
        said = error_of(listed.status, listed.body).message
        raise ConfigError(
            f"The server at {client.shown} does not list its models (status {listed.status}). {said}",
            hint="Is --engine-url that of its OpenAI interface, as in http://localhost:8001/v1?",
        )
    try:
        cards = {card.id: card for card in read(listed.body, PeerModels).data}
    except PeerLost as error:
        raise ConfigError(
            f"The server at {client.shown} does not answer as an OpenAI-compatible server does: {error}."
        ) from error
    if wanted and wanted not in cards:
        raise ConfigError(
            f"The server at {client.shown} has no model {wanted!r}; it has {', '.join(cards) or 'none'}.",
            hint="Set --engine-model.",
        )
    if not cards:
        raise ConfigError(f"The server at {client.shown} has no models.")
    return cards[wanted] if wanted else next(iter(cards.values()))


def _kind(engine_name: str, card: PeerModel, server: str) -> ServerKind:
    found = kind_of(card.owned_by or "", server)
    named = BY_ENGINE.get(engine_name)
    if named is None:
        return found
    if found.owner and found is not named:
        log.warning("the engine %s is asked for, and the server says that it is %s", engine_name, found.name)
    return named


async def _health_path(client: PeerClient) -> str:
    """Return the path that tells whether the peer is well, among those that it has."""
    try:
        return "/health" if (await client.ask("/health")).status == 200 else "models"
    except (PeerLost, RequestTimeout):
        return "models"


def _model_text(config: Config) -> ModelText | None:
    if not config.backend.tokenizer:
        return None
    # The peer has the model, and its sampling defaults.
    options = replace(config.model, generation_config="none")
    return open_model_text(resolve(config.backend.tokenizer), options)


def _context_length(config: Config, card: PeerModel) -> int:
    """Return the context length; 0: unknown, which is allowed where text is passed on."""
    told = card.max_model_len or (card.meta.n_ctx if card.meta is not None else None) or 0
    own = config.model.max_model_len
    length = min(told, own) if told and own else told or own
    if config.backend.tokenizer and not length:
        raise ConfigError(
            f"The remote engine does not tell how long the context of {card.id} is.",
            hint="Set --max-model-len, or leave --tokenizer away.",
        )
    return length
