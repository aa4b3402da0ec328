"""One prediction over gRPC, measured. Tokens are those that the last response counts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from weft.api.grpc.ai_service_pb2 import (
    GenerationParameters,
    StreamMetadata,
    StreamPredictRequest,
    StreamPredictResponse,
)
from weft.api.grpc.inference import SERVICE_NAME
from weft.bench.datasets import WORDS, Dialogue, DialogueTurn
from weft.bench.http_load import REQUEST_TIMEOUT_S, MeasuredAnswer
from weft.errors import ConfigError

MAX_MESSAGE_BYTES = 64 << 20


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to `host:port` or `unix:/path`, over a connection of its own."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address.removeprefix("grpc://"), options=options)


class GrpcClient:
    """Sends the turns of dialogues as predictions, each on a stream of its own, as the CY-LLM Engine's gateway
    does."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        options: Mapping[str, Any],
        *,
        key: str = "",
        model: str = "",
        keeps_text: bool = False,
        others: Sequence[grpc.aio.Channel] = (),
    ) -> None:
        """`model`: one of the server's; empty: its default. `others`: channels that it uses in turn with the first."""
        self._model = model
        self._predicts = cycle(
            each.stream_stream(
                f"/{SERVICE_NAME}/StreamPredict",
                StreamPredictRequest.SerializeToString,
                StreamPredictResponse.FromString,
            )
            for each in (channel, *others)
        )
        self._options = options
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._keeps_text = keeps_text
        self._own_channel: grpc.aio.Channel | None = None
        self.texts: list[tuple[str, str]] = []
        """The prompts and texts of whole answers, where they are kept."""

    async def converse(self, conversation: Dialogue, leave_after: int = 0) -> list[MeasuredAnswer]:
        answers: list[MeasuredAnswer] = []
        said = ""
        for turn in conversation.turns:
            said = f"{said}\n{prompt_of(turn)}".lstrip()
            answer = await self._ask(said, turn.output_tokens or max_tokens_of(turn.body), leave_after)
            answers.append(answer)
            if not answer.is_whole:
                break
            said += answer.text
        return answers

    @classmethod
    def at(cls, address: str, options: Mapping[str, Any], *, key: str, model: str) -> GrpcClient:
        """Return a client with a channel of its own. Raises ConfigError for what gRPC's requests have no field for."""
        if unknown := sorted(options.keys() - {"temperature", "top_p"}):
            raise ConfigError(f"A request over gRPC has no {', '.join(unknown)}.", hint="Measure that over HTTP.")
        channel = open_channel(address)
        client = cls(channel, options, key=key, model=model)
        client._own_channel = channel
        return client

    async def close(self) -> None:
        """Close its own channel; another is its owner's."""
        if self._own_channel is not None:
            await self._own_channel.close()

    async def _ask(self, prompt: str, max_tokens: int, leave_after: int) -> MeasuredAnswer:
        request = StreamPredictRequest(
            model_id=self._model,
            prompt=prompt,
            generation=GenerationParameters(
                max_new_tokens=max_tokens,
                temperature=self._options.get("temperature", 0.0),
                top_p=self._options.get("top_p", 1.0),
            ),
            metadata=StreamMetadata(trace_id=uuid.uuid4().hex),
        )
        answer = MeasuredAnswer(gaps_s=[])
        began = last = time.perf_counter()
        texts: list[str] = []
        ended = False
        call = next(self._predicts)(iter([request]), metadata=self._metadata, timeout=REQUEST_TIMEOUT_S)
        try:
            async for response in call:
                now = time.perf_counter()
                answer.num_messages += 1
                answer.num_bytes += response.ByteSize()
                if response.index != answer.num_messages - 1:
                    answer.error, answer.reason = "order", f"index {response.index} behind {answer.num_messages - 2}"
                if response.end_of_stream:
                    ended = True
                    answer.prompt_tokens, answer.output_tokens = response.prompt_tokens, response.completion_tokens
                    continue
                texts.append(response.chunk)
                if answer.first_s is None:
                    answer.first_s = now - began
                else:
                    answer.gaps_s.append(now - last)
                last = now
                if leave_after and answer.num_messages >= leave_after:
                    answer.was_cancelled = True
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            answer.error, answer.reason = error.code().name, error.details() or error.code().name
        except asyncio.CancelledError:
            if not answer.was_cancelled:
                raise
        answer.seconds = time.perf_counter() - began
        if answer.is_whole and not ended:
            answer.error, answer.reason = "stream", "the stream ended without its last response"
        answer.text = "".join(texts)
        if self._keeps_text:
            self.texts.append((prompt, answer.text))
        return answer


def prompt_of(turn: DialogueTurn) -> str:
    """Return a turn's text; token ids, which gRPC does not take, become as many words."""
    if "messages" in turn.body:
        return str(turn.body["messages"][-1]["content"])
    prompt: str | Sequence[int] = turn.body["prompt"]
    return prompt if isinstance(prompt, str) else " ".join(WORDS[token % len(WORDS)] for token in prompt)


def max_tokens_of(body: Mapping[str, Any]) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)
