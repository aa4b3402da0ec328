"""An engine reports counters and gauges of its process, and where its device's memory goes."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace


class ReplicaStats(Struct, frozen=True, kw_only=True, array_like=True):
    """The gauges of one of several replicas. Its state is connecting, ready, restarting or draining."""

    state: str
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    restarts: int = 0


class EngineStats(Struct, frozen=True, kw_only=True, array_like=True):
    """Counters and gauges of one engine process, as of now."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    encode_tokens: int = 0
    denoise_tokens: int = 0
    """Tokens that the kinds of work took of the steps' budgets. Drafts are decoded, prompts that become vectors or
    prompt embeds are encoded, and latents that are decoded count as denoised."""
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts: int = 0
    """Drafts that were verified."""
    draft_tokens: int = 0
    """Tokens that were drafted and verified."""
    accepted_tokens: int = 0
    """Drafted tokens that were right."""
    steps: int = 0
    prepared: bool = True
    """True when nothing is left to compile or capture: steps are as fast as they will be."""
    images_running: int = 0
    images_waiting: int = 0
    embedding_bytes: int = 0
    """Bytes that images hold, their latents and the hidden states of their prompts, and those of clients' tensors."""
    images: int = 0
    """Images that were finished."""
    denoise_steps: int = 0
    encode_seconds: float = 0.0
    """Seconds from admission until the prompts were encoded, of all images together."""
    denoise_seconds: float = 0.0
    """Seconds from there to the last step, of all images together."""
    restarts: int = 0
    """Times that the engine process was replaced."""
    open_requests: int = 0
    """Requests that were submitted and have not ended."""
    memory_allocated: int = 0
    """Bytes in use on the engine's device: of tensors on a GPU, of its processes on CPU; 0: unknown."""
    memory_reserved: int = 0
    """Bytes that the engine keeps of its device, those in use among them; 0: unknown."""
    moved_requests: int = 0
    """Requests that went on at another replica."""
    replicas: dict[str, ReplicaStats] = {}
    """The replicas by their ids, of an engine that has several; then all else is the sum over them."""

    def with_counters_of(self, past: EngineStats) -> EngineStats:
        """Counters go on from where they were; gauges are as of now."""
        return replace(self, **{name: getattr(self, name) + getattr(past, name) for name in COUNTERS})


COUNTERS = (
    "prompt_tokens",
    "computed_tokens",
    "decode_tokens",
    "prefill_tokens",
    "encode_tokens",
    "denoise_tokens",
    "generation_tokens",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "steps",
    "images",
    "denoise_steps",
    "encode_seconds",
    "denoise_seconds",
    "restarts",
    "moved_requests",
)
"""Fields of EngineStats that only rise. All others are gauges."""


class MemoryLedger(Struct, frozen=True, kw_only=True):
    """The ledger says where a device's memory goes, in bytes."""

    total: int = 0
    """Bytes of the device; on CPU those that were free before the model was loaded."""
    weights: int = 0
    activations: int = 0
    """Bytes that the largest step holds besides weights and cache, as measured, with the tables of rows and
    positions."""
    graphs: int = 0
    """Bytes kept free for graphs that are captured later: an estimate."""
    kv: int = 0
    others: int = 0
    """Bytes of other processes, the driver's context and libraries."""

    @property
    def spare(self) -> int:
        return self.total - self.weights - self.activations - self.graphs - self.kv - self.others
