"""GPUs and NPUs are listed as their drivers report them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.machine.devices import MIB, accelerator, ascend_devices, cuda_devices

GIB = 2**30


class Nvml:
    """A driver with two GPUs of 80 GiB, of which it keeps half a GiB; the second is in use. Errors are codes."""

    uuids = ("GPU-aaaa-1", "GPU-bbbb-2")

    def __init__(self, *, failing: str = "") -> None:
        self.failing = failing
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 9 if self.failing == "nvmlInit_v2" else 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, name: Any, size: int) -> int:
        name.value = b"NVIDIA H100"
        return 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, uuid: Any, size: int) -> int:
        uuid.value = self.uuids[(handle.value or 0) - 1].encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, handle.value or 0
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: ctypes.c_void_p, memory: Any) -> int:
        told = memory._obj
        if self.failing == "nvmlDeviceGetMemoryInfo_v2" or told.version != ctypes.sizeof(told) | 2 << 24:
            return 25
        told.total, told.reserved = 80 * GIB, GIB // 2
        told.free = (79 * GIB + GIB // 2) if handle.value == 1 else 30 * GIB
        return 0


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_gpus_have_the_memory_that_cuda_can_have(two_gpus: Path) -> None:
    nvml = Nvml()
    first, second = cuda_devices(two_gpus, nvml=nvml, environment={})
    assert (first.kind, first.index, first.name) == ("cuda", 0, "NVIDIA H100")
    assert first.total == first.free == 79 * GIB + GIB // 2
    assert (first.capability, second.capability) == ((9, 1), (9, 2))
    assert (second.index, second.free) == (1, 30 * GIB)
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        ("1", [30]),
        ("1,0", [30, 79.5]),
        ("GPU-bbbb", [30]),
        ("0,7,1", [79.5]),
        ("", []),
        ("-1", []),
        ("MIG-aaaa", [0]),
    ],
)
def test_a_process_sees_those_that_it_was_given(two_gpus: Path, visible: str, free: list[float]) -> None:
    devices = cuda_devices(two_gpus, nvml=Nvml(), environment={"CUDA_VISIBLE_DEVICES": visible})
    assert [device.free / GIB for device in devices] == free
    assert [device.index for device in devices] == list(range(len(free)))


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetMemoryInfo_v2"])
def test_a_driver_that_does_not_answer_leaves_the_memory_unknown(two_gpus: Path, failing: str) -> None:
    devices = cuda_devices(two_gpus, nvml=Nvml(failing=failing), environment={})
    assert [(device.index, device.total, device.free) for device in devices] == [(0, 0, 0), (1, 0, 0)]


def test_an_old_driver_leaves_the_memory_unknown(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Nvml, "nvmlDeviceGetMemoryInfo_v2")
    assert [device.total for device in cuda_devices(two_gpus, nvml=Nvml(), environment={})] == [0, 0]


def test_no_device_files_no_gpus(tmp_path: Path) -> None:
    assert cuda_devices(tmp_path, nvml=Nvml(), environment={}) == ()
    assert accelerator(tmp_path, {}) == "cpu"


def test_what_models_run_on_by_default(two_gpus: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert accelerator(two_gpus, {}) == "cuda"
    assert accelerator(two_gpus, {"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    npus = tmp_path_factory.mktemp("npus")
    (npus / "dev").mkdir()
    (npus / "dev" / "davinci_manager").touch()
    assert accelerator(npus, {}) == "cpu", "the driver's own file is no device"
    (npus / "dev" / "davinci3").touch()
    assert accelerator(npus, {}) == "ascend"


# As npu-smi prints it for a 910 (23.0, from the documentation of MindX) and a 910B (25.5, from the tests of telegraf's
# input npu_smi), but for the number of the second card.
CARDS = """
        Total Count                    : 2

        NPU ID                         : 0
        Chip Count                     : 1

        NPU ID                         : 4
        Chip Count                     : 1
"""
USAGES = {
    "0": """
        NPU ID                         : 0
        Chip Count                     : 1

        DDR Capacity(MB)               : 13553
        DDR Usage Rate(%)              : 6
        DDR Hugepages Total(page)      : 0
        DDR Hugepages Usage Rate(%)    : 0
        HBM Capacity(MB)               : 32768
        HBM Usage Rate(%)              : 0
        Aicore Usage Rate(%)           : 0
        Aicpu Usage Rate(%)            : 0
        Ctrlcpu Usage Rate(%)          : 0
        DDR Bandwidth Usage Rate(%)    : 0
        HBM Bandwidth Usage Rate(%)    : 0
        Chip ID                        : 0
""",
    "4": """
        NPU ID                         : 4
        Chip Count                     : 1

        DDR Capacity(MB)               : 0
        DDR Usage Rate(%)              : 0
        DDR Hugepages Total(page)      : 0
        DDR Hugepages Usage Rate(%)    : 0
        HBM Capacity(MB)               : 65536
        HBM Usage Rate(%)              : 5
        Aicore Usage Rate(%)           : 0
        Aivector Usage Rate(%)         : 0
        Aicpu Usage Rate(%)            : 0
        Ctrlcpu Usage Rate(%)          : 6
        DDR Bandwidth Usage Rate(%)    : 0
        HBM Bandwidth Usage Rate(%)    : 0
        NPU Utilization(%)             : 0
        Aicube Usage Rate(%)           : 0
        Chip ID                        : 0
""",
}


def npu_smi(command: Sequence[str]) -> str:
    match list(command):
        case ["npu-smi", "info", "-l"]:
            return CARDS
        case ["npu-smi", "info", "-t", "usages", "-i", card]:
            return USAGES[card]
    raise AssertionError(command)


@pytest.fixture
def two_npus(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "davinci4", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_npus_are_asked_for_by_card(two_npus: Path) -> None:
    first, second = ascend_devices(two_npus, ask=npu_smi, environment={})
    assert (first.kind, first.index, first.total, first.free) == ("ascend", 0, 32768 * MIB, 32768 * MIB)
    assert (second.index, second.total, second.free) == (1, 65536 * MIB, 65536 * MIB * 95 // 100)
    (seen,) = ascend_devices(two_npus, ask=npu_smi, environment={"ASCEND_RT_VISIBLE_DEVICES": "1"})
    assert (seen.index, seen.total) == (0, 65536 * MIB)


def test_npus_without_the_program_are_there_all_the_same(two_npus: Path) -> None:
    devices = ascend_devices(two_npus, ask=lambda command: "", environment={})
    assert [(device.kind, device.total) for device in devices] == [("ascend", 0), ("ascend", 0)]


def test_a_program_that_is_not_there_says_nothing(two_npus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert len(ascend_devices(two_npus, environment={})) == 2
