"""What a step costs beside the device's work: Python, waiting for the GIL, an idle device.

The GPU thread's own work is what it does between two waits for the device: it plans, launches and
commits. Of that, wall time less CPU time is time in which it had work but did not run: nearly
always it waited for the GIL, which the loop held, on a busy host also for a core. Where the device
is the GPU thread itself (cpu), launches count as the device's.

Runs on: any (pure).
"""

from typing import NamedTuple

from ..engine.api.messages import Stats


class Overhead(NamedTuple):
    """Figures of some time.

    Attributes:
        python_ms: wall time of the GPU thread's own work a step.
        gil_wait_ms: of it, time without a processor.
        loop_us: CPU time of the event loop's thread a generated token.
        device_idle: share of the time with work in which the device did nothing.
    """

    python_ms: float = 0.0
    gil_wait_ms: float = 0.0
    loop_us: float = 0.0
    device_idle: float = 0.0

    def rows(self) -> dict[str, float]:
        """By the names under which benchmarks print them."""
        return {
            "python_ms_per_step": self.python_ms,
            "gil_wait_ms_per_step": self.gil_wait_ms,
            "loop_us_per_token": self.loop_us,
            "device_idle_share": self.device_idle,
        }


def overhead(before: Stats, after: Stats, loop_cpu_s: float) -> Overhead:
    """Of the steps between two moments, in which the loop's thread ran for so long."""
    steps = after.steps - before.steps
    tokens = after.generated_tokens - before.generated_tokens

    def passed(*names: str) -> float:
        return sum(getattr(after, name) - getattr(before, name) for name in names)

    own_s = passed("plan_s", "launch_s", "commit_s")
    busy_s = own_s + passed("wait_s")
    return Overhead(
        python_ms=own_s / steps * 1e3 if steps else 0.0,
        gil_wait_ms=(own_s - passed("cpu_s")) / steps * 1e3 if steps else 0.0,
        loop_us=loop_cpu_s / tokens * 1e6 if tokens else 0.0,
        device_idle=max(0.0, 1 - passed("device_s") / busy_s) if busy_s else 0.0,
    )
