"""The remote engine against real servers of others, on a tiny random model: `make show-remote-peers`.

vLLM is large and lives in an environment of its own, whose Python is `--vllm`; `--llama-server` is a binary of
llama.cpp's server. What is not given is left out. Fails when a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from msgspec import Struct

from tests import tiny_models
from tests.generation import sample
from tests.waiting import PATIENCE, until, wait_until
from weft.backends.contract import Engine, Prompt, chat_prompt, text_prompt
from weft.backends.native import start_native
from weft.backends.openai_server.start import start
from weft.config import load
from weft.errors import InvalidRequest, WeftError
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.specs import JsonSchemaSpec, encode_spec
from weft.types import FinishReason, Output, SamplingParams

MODEL = "qwen3"
"""Its heads are as wide as vLLM's attention on CPU wants them."""
CONTEXT = 512
START_S = 1200
PROMPT = "The weft runs across the warp"
LETTER = 75
LETTERS = dict.fromkeys(range(68, 94), 50.0)
"""Tokens of one letter each: a random model's bytes are no text, and llama.cpp ends an answer that is none."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, logit_bias=LETTERS)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, logit_bias=LETTERS)


class Peer(Struct, frozen=True, kw_only=True):
    name: str
    command: list[str]
    running: str
    """The metric that counts its open requests."""
    environment: dict[str, str] = {}


class Failed(AssertionError):
    """Something was other than it must be."""


def must(true: bool, what: object) -> None:
    if not true:
        raise Failed(str(what))


async def all_of(engine: Engine, prompt: Prompt, params: SamplingParams) -> list[Output]:
    return [delta async for delta in await engine.submit(sample(prompt, params))]


def text_of(deltas: list[Output]) -> str:
    return "".join(delta.text for delta in deltas)


class Checks:
    """Each is a method; it raises Failed, or returns what to say."""

    def __init__(self, engine: Engine, native_tokens: list[int], peer: Peer, url: str) -> None:
        self.engine = engine
        self.native_tokens = native_tokens
        self.peer = peer
        self.url = url
        self.prompt = text_prompt(engine, PROMPT)

    async def answers(self) -> str:
        deltas = await all_of(self.engine, self.prompt, GREEDY)
        must(deltas[-1].finish is FinishReason.LENGTH, deltas[-1])
        must(deltas[-1].usage.completion_tokens == 12, deltas[-1].usage)
        return f"{len(deltas)} deltas"

    async def same_tokens_as_native(self) -> str:
        if not self.engine.abilities.answer_tokens:
            return "no ids are told"
        deltas = await all_of(self.engine, self.prompt, GREEDY)
        tokens = [token for delta in deltas for token in delta.token_ids]
        must(tokens == self.native_tokens, (tokens, self.native_tokens))
        return f"{len(tokens)} tokens"

    async def seeds(self) -> str:
        one, again, other = [
            text_of(
                await all_of(self.engine, self.prompt, SamplingParams(max_tokens=12, seed=seed, logit_bias=LETTERS))
            )
            for seed in (5, 5, 6)
        ]
        must(one == again, (one, again))
        must(one != other, one)
        return ""

    async def stop(self) -> str:
        params = SamplingParams(max_tokens=40, temperature=0, logit_bias={LETTER: 100.0}, ignore_eos=True)
        letter = text_of(await all_of(self.engine, self.prompt, params))[:1]
        stopped = SamplingParams(
            max_tokens=40, temperature=0, logit_bias={LETTER: 100.0}, ignore_eos=True, stop=(letter * 3,)
        )
        deltas = await all_of(self.engine, self.prompt, stopped)
        must(deltas[-1].finish is FinishReason.STOP, deltas[-1])
        must(text_of(deltas) == "", text_of(deltas))
        return ""

    async def logprobs(self) -> str:
        params = SamplingParams(max_tokens=3, temperature=0, logprobs=2)
        if not self.engine.abilities.logprobs:
            try:
                await self.engine.submit(sample(self.prompt, params))
            except InvalidRequest as refusal:
                return f"refused: {refusal.message}"
            raise Failed("it was not refused")
        deltas = await all_of(self.engine, self.prompt, params)
        for delta in deltas:
            for token, figure in zip(delta.token_ids, delta.logprobs or (), strict=True):
                must(figure.top[0] == (token, figure.logprob), figure)
        return ""

    async def form(self) -> str:
        spec = JsonSchemaSpec(schema={"enum": ["yes", "no"]})
        if self.engine.abilities.tokens:
            compiler = GrammarCompiler(self.engine.text.tokenizer)
            grammar = await compiler.compile(spec)
            await compiler.close()
        else:
            grammar = encode_spec(spec, 64)
        params = SamplingParams(max_tokens=40, temperature=0, grammar=grammar)
        try:
            deltas = await all_of(self.engine, self.prompt, params)
        except InvalidRequest as refusal:
            must(not self.engine.abilities.grammar, refusal)
            return f"refused: {refusal.message}"
        must(json.loads(text_of(deltas)) in ("yes", "no"), text_of(deltas))
        return text_of(deltas)

    async def chat(self) -> str:
        deltas = await all_of(self.engine, chat_prompt(self.engine, [{"role": "user", "content": "hi"}]), GREEDY)
        must(deltas[-1].usage.prompt_tokens > 5, deltas[-1].usage)
        return f"{deltas[-1].usage.prompt_tokens} prompt tokens"

    async def many(self) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(all_of(self.engine, self.prompt, GREEDY)) for _ in range(8)]
        texts = {text_of(task.result()) for task in tasks}
        must(len(texts) == 1, texts)
        return ""

    async def too_long(self) -> str:
        try:
            await all_of(self.engine, text_prompt(self.engine, "a b c " * 600), GREEDY)
        except InvalidRequest as refusal:
            return refusal.message[:60]
        raise Failed("it was not refused")

    async def leaving(self) -> str:
        answers = [await self.engine.submit(sample(self.prompt, LONG)) for _ in range(3)]
        for answer in answers:
            await anext(answer)
            await answer.aclose()
        must(self.engine.stats().open_requests == 0, self.engine.stats().open_requests)
        await asyncio.to_thread(wait_until, lambda: self._running() == 0, "the end of what nobody reads")
        return ""

    def _running(self) -> float:
        metrics = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        [found] = re.findall(rf"^{self.peer.running}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
        return float(found)


CHECKS: tuple[Callable[[Checks], Awaitable[str]], ...] = (
    Checks.answers,
    Checks.same_tokens_as_native,
    Checks.seeds,
    Checks.stop,
    Checks.logprobs,
    Checks.form,
    Checks.chat,
    Checks.many,
    Checks.too_long,
    Checks.leaving,
)


async def death(engine: Engine, process: subprocess.Popen[bytes]) -> str:
    """What a client sees of a peer that is killed in the middle of its answer."""
    answer = await engine.submit(sample(text_prompt(engine, PROMPT), LONG))
    await anext(answer)
    process.kill()
    last = [delta async for delta in answer][-1]
    must(last.finish is FinishReason.ERROR, last)
    await until(lambda: not engine.health().ready, "health says that the peer is lost")
    return last.error[:100]


async def run(peer: Peer, url: str, process: subprocess.Popen[bytes], folder: Path, native_tokens: list[int]) -> int:
    """How many checks failed."""
    num_failed = 0

    async def tell(mode: str, name: str, checking: Awaitable[str]) -> None:
        nonlocal num_failed
        began = time.perf_counter()
        try:
            said, mark = await checking, "ok"
        except (Failed, WeftError, ValueError, TimeoutError) as error:
            said, mark = f"{type(error).__name__}: {error}", "FAILED"
            num_failed += 1
        print(f"{peer.name:10} {mode:7} {name:22} {mark:7} {time.perf_counter() - began:6.2f} s  {said}", flush=True)

    for mode, tokenizer in (("tokens", str(folder)), ("text", "")):
        engine = await start(load({"engine": "remote", "engine_url": url, "tokenizer": tokenizer}, env={}))
        checks = Checks(engine, native_tokens, peer, url)
        for check in CHECKS:
            await tell(mode, getattr(check, "__name__", ""), check(checks))
        if mode == "text":
            await tell(mode, "death", death(engine, process))
        await engine.close()
    return num_failed


async def tokens_of_native(folder: Path) -> list[int]:
    flags = {"model": str(folder), "max_model_len": CONTEXT, "kv_cache_memory_mb": 64, "threads": 1, "device": "cpu"}
    engine = await start_native(load({**flags, "image_model": "none"}, env={}))
    deltas = await all_of(engine, text_prompt(engine, PROMPT), GREEDY)
    await engine.close()
    return [token for delta in deltas for token in delta.token_ids]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise SystemExit(f"The peer did not start:\n{log.read_text()[-4000:]}")


def peers(arguments: argparse.Namespace, folder: Path, gguf: Path, port: int) -> list[Peer]:
    at = ["--host", "127.0.0.1", "--port", str(port)]
    found = []
    if arguments.vllm:
        module = [arguments.vllm, "-m", "vllm.entrypoints.openai.api_server"]
        told = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"]
        found.append(
            Peer(
                name="vLLM",
                command=[*module, "--model", str(folder), *told, *at],
                running="vllm:num_requests_running",
                # Nothing is compiled, and nobody is told.
                environment={
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_CI_ENV": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
            )
        )
    if arguments.llama_server:
        told = ["--ctx-size", str(4 * CONTEXT), "--parallel", "4", "--metrics", "--no-webui"]
        found.append(
            Peer(
                name="llama.cpp",
                command=[arguments.llama_server, "--model", str(gguf), *told, *at],
                running="llamacpp:requests_processing",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="", help="The Python of an environment with vLLM.")
    parser.add_argument("--llama-server", default="", help="llama.cpp's llama-server.")
    arguments = parser.parse_args()
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = tiny_models.save_directory(MODEL, Path(temporary) / MODEL)
        gguf = tiny_models.save_gguf(MODEL, Path(temporary) / "tiny.gguf", "F32")
        native_tokens = asyncio.run(tokens_of_native(folder))
        port = free_port()
        for peer in peers(arguments, folder, gguf, port):
            log = Path(temporary) / "log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    peer.command, stdout=out, stderr=out, env=os.environ | peer.environment, start_new_session=True
                )
            try:
                wait_for(f"http://127.0.0.1:{port}", process, log)
                num_failed += asyncio.run(run(peer, f"http://127.0.0.1:{port}", process, folder, native_tokens))
            finally:
                # A server that was killed may have left others of its processes behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
