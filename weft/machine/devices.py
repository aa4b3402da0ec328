"""Lists GPUs and NPUs, and how much of their memory is free. The drivers are asked; torch is not imported.

`root` is where the kernel's files are looked for: `/` except in tests.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

MIB = 2**20
ROOT = Path("/")

Accelerator = Literal["cuda", "ascend", "cpu"]
Ask = Callable[[Sequence[str]], str]


class Device(Struct, frozen=True, kw_only=True):
    """A GPU or an NPU. Sizes are in bytes; 0 where they are not known."""

    kind: Literal["cuda", "ascend"]
    index: int
    """The number among the devices that this process may use."""
    name: str
    total: int = 0
    free: int = 0
    capability: tuple[int, int] = (0, 0)
    """The compute capability of a GPU; zeros where it is not known."""


def accelerator(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Accelerator:
    """Return what models run on here by default. It is quick, because no driver is asked."""
    if _device_files(root, "nvidia") and environment.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
        return "cuda"
    if _device_files(root, "davinci") and environment.get("ASCEND_RT_VISIBLE_DEVICES", "0") != "":
        return "ascend"
    return "cpu"


def _device_files(root: Path, name: str) -> list[int]:
    """Return the numbers of /dev/<name>0, /dev/<name>1, …; not /dev/nvidiactl or /dev/davinci_manager."""
    found = (re.fullmatch(rf"{name}(\d+)", path.name) for path in (root / "dev").glob(f"{name}*"))
    return sorted(int(match[1]) for match in found if match)


# NVIDIA GPUs, by the driver's own library.


class _NvmlError(Exception):
    """The driver does not have a function, or the function failed."""


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


_NVML_MEMORY_2 = ctypes.sizeof(_NvmlMemory) | 2 << 24
_NVML_TEXT_BYTES = 96


def cuda_devices(
    root: Path = ROOT, *, nvml: Any = None, environment: Mapping[str, str] = os.environ
) -> tuple[Device, ...]:
    """Return the GPUs that CUDA would show this process. No context is created on them."""
    numbers = _device_files(root, "nvidia")
    if not numbers:
        return ()
    try:
        library = nvml or ctypes.CDLL("libnvidia-ml.so.1")
        named = list(_nvml_devices(library))
    except (OSError, _NvmlError):
        named = [(f"GPU-{number}", Device(kind="cuda", index=number, name="NVIDIA GPU")) for number in numbers]
    return _visible(named, environment.get("CUDA_VISIBLE_DEVICES"))


def _nvml_devices(nvml: Any) -> Iterator[tuple[str, Device]]:
    """Yield every GPU with its UUID."""

    def call(name: str, *arguments: Any) -> None:
        function = getattr(nvml, name, None)
        if function is None or function(*arguments) != 0:
            raise _NvmlError(name)

    call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), _NvmlMemory(version=_NVML_MEMORY_2)
            name, uuid = (ctypes.create_string_buffer(_NVML_TEXT_BYTES) for _ in range(2))
            call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            call("nvmlDeviceGetName", handle, name, _NVML_TEXT_BYTES)
            call("nvmlDeviceGetUUID", handle, uuid, _NVML_TEXT_BYTES)
            call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
            major, minor = ctypes.c_int(), ctypes.c_int()
            call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            device = Device(
                kind="cuda",
                index=index,
                name=name.value.decode(),
                # What the driver keeps for itself is no part of what CUDA calls the total.
                total=memory.total - memory.reserved,
                free=memory.free,
                capability=(major.value, minor.value),
            )
            yield uuid.value.decode(), device
    finally:
        nvml.nvmlShutdown()


def _visible(named: list[tuple[str, Device]], wanted: str | None) -> tuple[Device, ...]:
    """Return the devices that a variable names by number or by UUID, numbered anew; all without one. As in CUDA, an
    unknown name ends the list."""
    if wanted is None:
        return tuple(device for _, device in named)
    chosen: list[Device] = []
    for word in map(str.strip, wanted.split(",")):
        if word.startswith("MIG-"):
            found = [Device(kind="cuda", index=0, name="a part of an NVIDIA GPU")]
        elif word.startswith("GPU-"):
            found = [device for uuid, device in named if uuid.startswith(word)]
        else:
            found = [device for _, device in named if word == str(device.index)]
        if not found:
            break
        chosen.append(replace(found[0], index=len(chosen)))
    return tuple(chosen)


# Ascend NPUs, by the program that comes with their driver.


def _ask_program(command: Sequence[str]) -> str:
    """Return what the program prints; empty where there is no such program, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def ascend_devices(
    root: Path = ROOT, *, ask: Ask = _ask_program, environment: Mapping[str, str] = os.environ
) -> tuple[Device, ...]:
    numbers = _device_files(root, "davinci")
    if not numbers:
        return ()
    cards = re.findall(r"NPU ID\s*:\s*(\d+)", ask(["npu-smi", "info", "-l"]))
    chips = [chip for card in cards for chip in _ascend_chips(ask(["npu-smi", "info", "-t", "usages", "-i", card]))]
    found = [
        Device(kind="ascend", index=index, name="Ascend NPU", total=total, free=free)
        for index, (total, free) in enumerate(chips)
    ] or [Device(kind="ascend", index=number, name="Ascend NPU") for number in numbers]
    return _visible([("", device) for device in found], environment.get("ASCEND_RT_VISIBLE_DEVICES"))


def _ascend_chips(usages: str) -> Iterator[tuple[int, int]]:
    """Yield total and free memory of every chip of a card. The lines of a chip end with its number."""
    for block in re.split(r"Chip ID\s*:\s*\d+", usages)[:-1]:
        lines = dict(re.findall(r"^\s*(\S.*?)\s*:\s*(\d+)\s*$", block, re.MULTILINE))
        for kind in ("HBM", "DDR"):
            total = int(lines.get(f"{kind} Capacity(MB)", 0)) * MIB
            if total:
                yield total, total * (100 - int(lines.get(f"{kind} Usage Rate(%)", 0))) // 100
                break
