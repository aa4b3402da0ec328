"""A real server over a tiny random model: what it does is real, what it says is nonsense, and it is quick."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.e2e.server import Server
from tests.waiting import wait_until
from weft.observe.watchdog import LOGGED_S

NAME = "tiny"
ADMIN_KEY = "boss"


class TinyServer(Server):
    def __init__(self, model: Path, *flags: str, **how: Any) -> None:
        # On a busy machine an engine may be silent for longer than the default allows.
        patient = ("--heartbeat-timeout-s", "120")
        super().__init__("--model", str(model), "--served-model-name", NAME, *patient, *flags, **how)
        self.first_engine = self.engine_pid()

    def check_unharmed(self) -> None:
        """The first engine still runs, and holds nothing; the log tells of no error. The engine checks its own books
        whenever it is idle, and would have died of a block that was lost."""
        held = ("weft_num_requests_running", "weft_num_requests_waiting", "weft_kv_cache_usage_perc")
        wait_until(lambda: not any(map(self.metric, held)), f"0 of {', '.join(held)}")
        self.check_alive()

    def check_alive(self) -> None:
        self.wait_until_ready()
        assert self.metric("weft_engine_restarts_total") == 0
        assert self.engine_pid() == self.first_engine
        assert not self.errors()

    def stalls(self) -> dict[float, int]:
        """How often the event loop stood still for longer than each of some times, in seconds."""
        bucket = re.compile(r'^weft_event_loop_stall_seconds_bucket\{.*?le="(\S+?)".*?\} (\S+)$', re.MULTILINE)
        counts = [(float(bound), int(float(count))) for bound, count in bucket.findall(self.get("/metrics").text)]
        return {bound: counts[-1][1] - count for bound, count in counts[:-1]}

    def longest_stall(self) -> float:
        """How long the event loop stood still while the process computed, in seconds, at most; a busy machine adds to
        its stalls, but not to that."""
        stall = re.compile(r"the event loop stood still seconds=(\S+) cpu_seconds=(\S+)")
        count = self.stalls()[LOGGED_S]

        def told() -> list[re.Match[str]]:
            return [match for line in self.log if (match := stall.search(line))]

        wait_until(lambda: len(told()) >= count, f"{count} stalls in the log")
        return max((min(map(float, match.groups())) for match in told()), default=0.0)

    def errors(self) -> list[str]:
        """The lines of the log that tell of an error."""
        return [line for line in self.log if " ERROR " in line]

    def memory_mb(self) -> dict[str, float]:
        """Resident, of the api process and of its engine."""
        return {"api": resident_mb(self.process.pid), "engine": resident_mb(self.first_engine)}

    def num_files(self) -> int:
        """Open in the api process, connections included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


class GuardedServer(TinyServer):
    """A tiny server with everything that a client may try: images and tensors, an operator, and the tenants good and
    bad, whose keys are their names."""

    def __init__(self, model: Path, image_model: Path, keys: Path, *flags: str) -> None:
        keys.write_text("good: good\nbad: bad\n")
        guarded = ("--api-key-file", str(keys), "--admin-key", ADMIN_KEY, "--data-dir", str(keys.with_suffix(".data")))
        images = ("--image-model", str(image_model), "--allow-prompt-embeds")
        self.key = "good"
        # The tests look at its memory.
        super().__init__(model, *guarded, *images, "--tool-style", "hermes", "--threads", "1", *flags, is_fork=False)


def resident_mb(pid: int) -> float:
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 1024
