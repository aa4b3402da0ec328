"""Plans a load before anything is allocated: what the model will take of a device, and what fits.

Weights are counted by the headers of the files and held as the engine holds them; the cache by the model's real
geometry. Those are known. What a step, graphs and libraries take is estimated. A load is refused by what is known
alone; the largest context and batch that the plan names leave memory for the rest.
"""

from __future__ import annotations

import io
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft.checkpoint.adapter_files import MAX_RANK
from weft.checkpoint.model_files import ModelFiles
from weft.engine_stats import MemoryLedger
from weft.errors import ConfigError, OutOfMemory
from weft.machine.hardware import Machine
from weft.machine.memory import (
    GIB,
    GRAPH_SLACK_BYTES,
    HIGHEST_SHARE,
    MIB,
    DeviceMemory,
    MemoryPlan,
    activations_bytes,
    adapter_bytes,
    check_shards,
    check_step,
    kv_bytes_per_token,
    plan_memory,
    safe_share,
)
from weft.machine.model_size import (
    Geometry,
    ModelSize,
    Weights,
    adapters_bytes,
    quantised_bytes,
    safetensors_weights,
    size_of,
)
from weft.options import Config

Place = Literal["cpu", "cuda", "ascend"]

SAMPLING_COPIES = 6
"""Copies of the logits, as float32, that the costliest way to sample holds at once."""
GRAPH_ROWS, GRAPH_ROWS_BESIDES = 16, 240
"""Rows of logits that all graphs hold together: so many for each running request, and so many more."""
GRAPH_PROMPT_TOKENS = 2048
"""Prompt tokens in the largest graph."""
ONLINE_BYTES = {"fp8": 1.0, "bitsandbytes": 0.5}
"""Bytes of a number that an engine quantises while it loads."""
PACKAGED_IMAGE_MODEL = Path(__file__).parents[1] / "data" / "shapes"


class HeldType(Struct, frozen=True):
    name: str
    itemsize: int


TYPES = {held.name: held for held in (HeldType("float32", 4), HeldType("float16", 2), HeldType("bfloat16", 2))}


CPU_CACHE_BYTES = 512 * MIB
AUTO_DTYPE: dict[Place, str] = {"cpu": "float32", "cuda": "bfloat16", "ascend": "bfloat16"}
"""The dtype where none is asked for; it is the same for every engine."""


class MemoryProfile(Struct, frozen=True, kw_only=True):
    """The memory profile of an engine: how it stores a model."""

    place: Place | None = None
    """The kind of device that it runs on; None for what --device says."""
    framework_bytes: int
    """An estimate of the memory of libraries and the device's context. A CPU has half of it."""
    keeps_packed: bool = False
    """True when quantised weights stay as they are in the files."""
    takes_whole_share: bool = False
    """True when it does not start on a GPU where its share of it is not free."""
    reserves_adapters: bool = False
    """True when it reserves memory at its start for the largest adapter, --max-loras times."""
    has_image_model: bool = False
    """True when it loads an image model as well."""


NATIVE = MemoryProfile(framework_bytes=GIB, has_image_model=True)
VLLM = MemoryProfile(
    place="cuda", framework_bytes=2 * GIB, keeps_packed=True, takes_whole_share=True, reserves_adapters=True
)
MEMORY_PROFILES = {
    "native": NATIVE,
    "cuda-vllm-async": VLLM,
    "cuda-vllm": VLLM,
    "cpu-vllm": replace(VLLM, place="cpu"),
    "ascend-vllm": replace(VLLM, place="ascend"),
}
"""The engines that load a model on this machine. There is no plan for others."""


class Plan(Struct, frozen=True, kw_only=True):
    model: str
    engine: str
    place: Place
    device: str
    """The device's name."""
    dtype: str
    memory: DeviceMemory
    """The device's memory with the estimates. Its total is 0 where it is not known."""
    weights: int
    kv: int
    """Bytes of the cache."""
    kv_per_token: int
    """Bytes of one token in the cache; 0 where the geometry is not known."""
    num_blocks: int
    max_model_len: int
    """The context that is asked for, or the default; 0 where it is not known."""
    max_num_seqs: int
    max_num_batched_tokens: int
    free_share: float
    """The share of the device's memory that could be asked for now, in hundredths."""
    largest_context: int
    """The longest context of one request, with the largest possible cache; 0 for none, or where it is not known."""
    largest_batch: int
    """Requests of `max_model_len` tokens that the cache holds at once."""
    unpacked_bytes: int = 0
    """Bytes that the files hold as quantised weights, which the engine unpacks; 0: none."""
    packed_bytes: int = 0
    """Bytes of those that it holds as they are."""
    more_cache_mb: int = 0
    """A --kv-cache-memory-mb with which more of them would fit; 0: there is no memory for more."""
    more_batch: int = 0
    """Requests of `max_model_len` tokens that such a cache would hold."""
    problem: OutOfMemory | None = None
    """Why the model cannot be loaded with these settings."""
    is_final: bool = False
    """True when smaller settings would not help: the weights are too large, or the context is not the model's."""
    warning: str = ""
    """Why the load may fail: by the estimates it does not fit."""

    @property
    def ledger(self) -> MemoryLedger:
        return self.memory.ledger(self.weights, self.kv)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that the load takes of the device in all."""
        memory = self.memory
        return self.weights + self.kv + memory.activations + memory.graphs + memory.libraries


def plan_load(config: Config, files: ModelFiles, machine: Machine, *, engine: str = "native") -> Plan:
    """Plan a load by an engine of MEMORY_PROFILES. Raises ModelError for files that cannot be read and ConfigError for
    a device that is not there and a model that ranks cannot share; a model that does not fit is reported in
    `Plan.problem`."""
    return Planner(files, engine).plan(config, machine)


class Planner:
    """A planner makes plans for one model and one engine. The files are read once."""

    def __init__(self, files: ModelFiles, engine: str = "native") -> None:
        self.files = files
        self.engine = engine
        self.size = size_of(files)
        self.draft = size_of(files.draft) if files.draft is not None else None

    def plan(self, config: Config, machine: Machine) -> Plan:
        return _Planning(config, machine, self).plan()


def _image_weights(wanted: str) -> Weights:
    """Count the weights of the image model beside the language model."""
    if wanted == "none":
        return Weights()
    folder = PACKAGED_IMAGE_MODEL if wanted == "auto" else Path(wanted).expanduser()
    return safetensors_weights(sorted(folder.rglob("*.safetensors")))


class _Planning:
    """The computation of one plan."""

    def __init__(self, config: Config, machine: Machine, planner: Planner) -> None:
        self.config = config
        self.machine = machine
        self.planner = planner
        self.profile = MEMORY_PROFILES[planner.engine]
        self.place = _place(config, self.profile, machine)
        dtype = config.model.dtype
        self.dtype = TYPES[AUTO_DTYPE[self.place] if dtype == "auto" else dtype]
        self.holds_panels = (
            planner.engine == "native"
            and self.place == "cpu"
            and dtype == "auto"
            and planner.size.weights.panel_bytes > 0
            and find_spec("numba") is not None
        )
        """True where quantised weights stay so, for the native engine's own kernels."""
        quantization, stored = config.backend.quantization, planner.size.weights
        self.multiplies = planner.engine == "native" and self.place == "cuda" and self.dtype.itemsize == 2
        """True where the native engine multiplies quantised weights on a GPU."""
        self.holds_quantised = (self.multiplies and (quantization != "" or stored.is_quantised)) or (
            planner.engine == "native" and self.place == "cpu" and quantization == "int8"
        )
        """True where it holds the decoder's linear weights so."""
        self.parts = config.backend.tensor_parallel_size if self.place != "cpu" or planner.engine == "native" else 1
        """Ranks that share the model; the plan is for one of them."""
        if planner.engine == "native" and planner.size.geometry is not None:
            check_shards(planner.size.geometry, self.parts)
        self.weights = self._held_weights()
        self.draft = planner.draft.geometry if planner.draft is not None else None
        """The geometry of the draft model; None: there is none, or its description does not tell."""
        self.seqs = config.scheduler.num_seqs(on_cpu=self.place == "cpu")
        self.budget = config.scheduler.num_batched_tokens(on_cpu=self.place == "cpu")
        check_step(self.budget, self.seqs)

    def plan(self) -> Plan:
        config, geometry = self.config, self.planner.size.geometry
        known = self._known_memory()
        context = config.model.max_model_len or (geometry.max_position if geometry is not None else 0)
        memory = self._with_estimates(known, context)
        plan = Plan(
            model=self.planner.files.name,
            engine=self.planner.engine,
            place=self.place,
            device=self._device_name(),
            dtype=self.dtype.name,
            memory=memory,
            weights=self.weights,
            unpacked_bytes=0 if self.keeps_packed else self.planner.size.weights.packed_bytes,
            packed_bytes=self.planner.size.weights.packed_bytes if self.keeps_packed else 0,
            kv=0,
            kv_per_token=0,
            num_blocks=0,
            max_model_len=context,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget,
            free_share=_free_share(config, known),
            largest_context=0,
            largest_batch=0,
        )
        if known.total == 0:
            return replace(plan, warning="How much memory the device has is not known.")
        if self.weights > known.total - known.others:
            return replace(plan, problem=self._too_heavy(known), is_final=True)
        if geometry is None:
            return replace(plan, warning="The model's description does not tell how large its cache is.")
        return self._with_cache(plan, geometry, known)

    def _with_cache(self, plan: Plan, geometry: Geometry, known: DeviceMemory) -> Plan:
        geometry = replace(geometry, num_kv_heads=max(1, geometry.num_kv_heads // self.parts))
        cache, models = self.config.cache, [geometry] if self.draft is None else [geometry, self.draft]
        per_token = sum(kv_bytes_per_token(one, self.dtype, cache) for one in models)
        block_size = cache.block_size
        free_tokens = max(0, plan.memory.available - plan.weights) // (per_token * block_size) * block_size - block_size
        plan = replace(
            plan,
            kv_per_token=per_token,
            largest_context=max(0, min(free_tokens, geometry.max_position)),
        )
        problem, warning, made = None, "", None
        try:
            made = self._cache(geometry, plan.memory)
        except OutOfMemory as error:
            warning = f"By what steps and libraries are estimated to take, it is too much: {error.message}"
            try:
                made = self._cache(geometry, known)
            except OutOfMemory as certain:
                problem, warning = certain, ""
        problem = problem or self._share_not_free(plan, known)
        if made is not None:
            context = -(-made.max_model_len // block_size) * block_size
            batch, more = (made.num_blocks - 1) * block_size // context, max(0, free_tokens) // context
            plan = replace(
                plan,
                kv=made.kv_bytes,
                num_blocks=made.num_blocks,
                max_model_len=made.max_model_len,
                largest_batch=batch,
            )
            if more > batch:
                cache_mb = -(-(more * context + block_size) * per_token // MIB)
                plan = replace(plan, more_batch=more, more_cache_mb=cache_mb)
        asked = self.config.model.max_model_len
        is_final = asked != 0 and not 2 <= asked <= geometry.max_position
        return replace(plan, problem=problem, warning=warning, is_final=is_final)

    def _cache(self, geometry: Geometry, memory: DeviceMemory) -> MemoryPlan:
        """Plan the cache that the engine will make, by its own arithmetic."""
        return plan_memory(
            geometry,
            self.config.cache,
            memory,
            max_model_len=self.config.model.max_model_len,
            dtype=self.dtype,
            weights_bytes=self.weights,
            kv_memory_bytes=CPU_CACHE_BYTES if self.place == "cpu" else None,
            draft=self.draft,
        )

    def _held_weights(self) -> int:
        image_model = _image_weights(self.config.model.image_model) if self.profile.has_image_model else Weights()
        slots_of = self.planner.size.geometry if self.place == "cuda" else None
        adapters = 0 if self.profile.reserves_adapters else adapters_bytes(self.config, self.dtype, slots_of)
        draft = self._held(self.planner.draft) if self.planner.draft is not None else 0
        beside = draft + image_model.held_bytes(self.dtype, unpacked=True) + adapters
        return self._held(self.planner.size) // self.parts + beside

    def _held(self, size: ModelSize) -> int:
        """Return the bytes of a model's weights as the engine holds them."""
        weights, quantization = size.weights, self.config.backend.quantization
        held = weights.held_bytes(self.dtype, unpacked=not self.profile.keeps_packed)
        if self.holds_panels and weights.panel_bytes:
            held = weights.held_in_panels(self.dtype)
        if self.holds_quantised and size.geometry is not None and (quantization or weights.is_quantised):
            held = quantised_bytes(size.geometry, weights, quantization, self.dtype, on_gpu=self.multiplies)
        if self.profile.keeps_packed and not weights.packed and quantization in ONLINE_BYTES:
            held = int(weights.floats * ONLINE_BYTES[quantization])
        return held

    @property
    def keeps_packed(self) -> bool:
        return self.profile.keeps_packed or self.holds_panels or self.holds_quantised

    def _known_memory(self) -> DeviceMemory:
        """Return the device's memory as it is now."""
        if self.place == "cpu":
            return DeviceMemory(total=self.machine.memory.available // self.parts)
        devices = self.machine.devices_of(self.place)[: self.parts]
        total, free = min(device.total for device in devices), min(device.free for device in devices)
        return DeviceMemory(total=total, share=safe_share(self.config.cache), others=total - free)

    def _with_estimates(self, known: DeviceMemory, context: int) -> DeviceMemory:
        geometry = self.planner.size.geometry
        libraries = self.profile.framework_bytes // (2 if self.place == "cpu" else 1)
        if geometry is not None and self.profile.reserves_adapters and self.config.model.wants_adapters:
            libraries += self.config.scheduler.max_loras * adapter_bytes(geometry, MAX_RANK, self.dtype)
        memory = replace(known, libraries=libraries, others=known.others + libraries)
        if geometry is None:
            return memory
        logits = geometry.vocab_size * self.seqs * 4 * SAMPLING_COPIES
        tables = (self.seqs + 1) * context * 8
        step = activations_bytes(geometry, self.dtype, self.budget) // self.parts
        graphs = 0
        if self.place != "cpu":
            rows = GRAPH_ROWS * self.seqs + GRAPH_ROWS_BESIDES
            if self.config.model.wants_adapters and not self.profile.reserves_adapters:
                rows *= 2  # steps with adapters have graphs of their own
            graphs = geometry.vocab_size * rows * self.dtype.itemsize + GRAPH_SLACK_BYTES
            graphs += activations_bytes(geometry, self.dtype, self.seqs + GRAPH_PROMPT_TOKENS) // self.parts
        return replace(memory, activations=step + logits + tables, graphs=graphs)

    def _device_name(self) -> str:
        if self.place == "cpu":
            name = f"CPU, {self.machine.cpu.usable_cores} cores"
        else:
            name = self.machine.devices_of(self.place)[0].name
        return name if self.parts == 1 else f"{name}, each of {self.parts}"

    def _too_heavy(self, known: DeviceMemory) -> OutOfMemory:
        ways = ["Serve a smaller model"]
        if self.profile.keeps_packed or self.place == "cpu":
            ways.append("one that is quantised")
        if self.dtype.itemsize == 4:
            ways.append("set --dtype bfloat16")
        packed = self.planner.size.weights.packed_bytes if not self.keeps_packed else 0
        unpacked = f", unpacked from {packed / GIB:.1f} GiB of quantised ones," if packed else ""
        return OutOfMemory(
            f"The weights of {self.planner.files.name}{unpacked} take {self.weights / GIB:.1f} GiB as "
            f"{self.dtype.name}; {(known.total - known.others) / GIB:.1f} GiB are free.",
            hint=f"{', '.join(ways)}, or free some memory.",
        )

    def _share_not_free(self, plan: Plan, known: DeviceMemory) -> OutOfMemory | None:
        share, free = int(known.total * known.share), known.total - known.others
        if not self.profile.takes_whole_share or self.place == "cpu" or share <= free:
            return None
        return OutOfMemory(
            f"--gpu-memory-utilization {known.share:g} is {share / GIB:.1f} GiB; {free / GIB:.1f} GiB are free.",
            hint=f"Set --gpu-memory-utilization {plan.free_share:.2f} or less.",
        )


def _place(config: Config, profile: MemoryProfile, machine: Machine) -> Place:
    wanted = profile.place or config.model.device
    if wanted == "auto":
        wanted = "cuda" if machine.devices_of("cuda") else "cpu"
    if wanted == "cpu":
        return "cpu"
    if not machine.devices_of(wanted):
        raise ConfigError(
            f"There is no {wanted} device on this machine.",
            hint="Try --device cpu; `weft plan --memory-gib` plans for another machine.",
        )
    return "cuda" if wanted == "cuda" else "ascend"


def _free_share(config: Config, known: DeviceMemory) -> float:
    """Return the share that is free, and no more than is safe unless the operator insists."""
    if known.total == 0:
        return 0.0
    highest = 1.0 if config.cache.insist_gpu_memory else HIGHEST_SHARE
    return min(highest, math.floor((known.total - known.others) / known.total * 100) / 100)


LOG_WIDTH = 100


def plan_table(plan: Plan) -> RenderableType:
    """Show the memory as a table, and below it what fits."""
    ledger, memory = plan.ledger, plan.memory
    table = Table(box=None, pad_edge=False, title=_title(plan), title_justify="left", title_style="bold")
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("source")
    for name, size, source in (
        ("weights", ledger.weights, _weights_source(plan)),
        ("KV cache", ledger.kv, _cache_source(plan)),
        ("activations", ledger.activations, f"estimated: {plan.max_num_batched_tokens} tokens a step"),
        ("graphs", ledger.graphs, f"estimated: {plan.max_num_seqs} requests at a time"),
        ("libraries", memory.libraries, "estimated"),
        ("other processes", ledger.others - memory.libraries, "in use now"),
        ("spare", ledger.spare, _spare_source(plan)),
        ("total", ledger.total, "free now" if memory.share == 1.0 else "of the device"),
    ):
        share = f"{size / ledger.total:.1%}" if ledger.total else "?"
        table.add_row(name, f"{size / GIB:.2f}", share, source)
    return Group(table, *(Text(line) for line in _verdict(plan)))


def plan_fields(plan: Plan) -> dict[str, object]:
    """Return the same as named values for a log."""
    ledger, libraries = plan.ledger, plan.memory.libraries
    sizes = {
        "weights": ledger.weights,
        "kv_cache": ledger.kv,
        "activations": ledger.activations,
        "graphs": ledger.graphs,
        "libraries": libraries,
        "others": ledger.others - libraries,
        "spare": ledger.spare,
        "total": ledger.total,
    }
    return {
        "model": plan.model,
        "engine": plan.engine,
        "device": plan.device,
        "dtype": plan.dtype,
        **{f"{name}_gib": round(size / GIB, 3) for name, size in sizes.items()},
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "largest_context": plan.largest_context,
        "largest_batch": plan.largest_batch,
        "problem": None if plan.problem is None else str(plan.problem),
    }


def plan_lines(plan: Plan) -> list[str]:
    """Show the table as lines of a log."""
    console = Console(file=io.StringIO(), width=LOG_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(plan_table(plan))
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def _title(plan: Plan) -> str:
    return f"{plan.model} by {plan.engine} on {plan.device}"


def _weights_source(plan: Plan) -> str:
    if plan.packed_bytes:
        return f"by the files: {plan.packed_bytes / GIB:.2f} GiB quantised, and held so"
    if not plan.unpacked_bytes:
        return f"by the files, held as {plan.dtype}"
    return f"by the files: {plan.unpacked_bytes / GIB:.2f} GiB quantised, unpacked to {plan.dtype}"


def _cache_source(plan: Plan) -> str:
    if not plan.num_blocks:
        return "not known" if plan.problem is None else "does not fit"
    return f"{plan.kv_per_token / 1024:.1f} KiB a token, {plan.num_blocks} blocks"


def _spare_source(plan: Plan) -> str:
    return "" if plan.memory.share == 1.0 else f"--gpu-memory-utilization is {plan.memory.share:g}"


def _verdict(plan: Plan) -> list[str]:
    lines = []
    if plan.kv_per_token:
        lines.append(f"longest context of one request, with the largest cache: {plan.largest_context} tokens")
        if plan.num_blocks:
            more = f"; {plan.more_batch} with --kv-cache-memory-mb {plan.more_cache_mb}" if plan.more_batch else ""
            lines.append(f"concurrent requests of {plan.max_model_len} tokens: {plan.largest_batch}{more}")
    if plan.problem is not None:
        return [*lines, f"does not fit: {plan.problem}"]
    return [*lines, plan.warning or f"fits, with a context of {plan.max_model_len} tokens"]
