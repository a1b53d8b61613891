"""A file with the size and the time of each step, from which `stoker simulate` fits its costs.

One JSON object a line: first what the engine is, then the steps, with the time of day at which each
ended.

Runs on: gpu.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from .api.errors import StartError
from .core.plan import StepPlan
from .core.shape import StepShape

log = logging.getLogger("stoker")

FORMAT = 1


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step: its size, how long the device worked on it, and the GPU thread's own work."""

    shape: StepShape
    device_s: float
    host_s: float


class StepLog:
    """Writes the log. A step is `planned`, later `done`; at most two are in between.

    Where the file can no longer be written, as on a full disk, the log ends there with a warning.

    Args:
        path: the file; an older one is replaced. Raises StartError where it cannot be written.
        engine: the first line: what a simulation must know of this engine.
        is_async: whether the device works beside the GPU thread, for the first line.
    """

    def __init__(self, path: Path, engine: dict[str, Any], *, is_async: bool):
        try:
            self._file: TextIO | None = path.open("w")
        except OSError as error:
            raise StartError(f"--step-log {path}: {error.strerror}") from None
        self._path = path
        self._planned: deque[StepShape] = deque()
        self._own_s = 0.0
        self._write({"steps_format": FORMAT, "is_async": is_async, **engine})

    def planned(self, plan: StepPlan) -> None:
        """A step was launched."""
        self._planned.append(StepShape.of(plan))

    def done(self, device_s: float, own_s: float) -> None:
        """The oldest planned step has ended.

        Args:
            own_s: what the GPU thread has spent on plans, launches and commits so far.
        """
        host_s, self._own_s = own_s - self._own_s, own_s
        shape = self._planned.popleft()
        times = {"device_s": round(device_s, 7), "host_s": round(host_s, 7)}
        times["at_s"] = round(time.time(), 3)
        self._write(asdict(shape) | times)

    def close(self) -> None:
        """Write what is left."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)

    def _write(self, values: dict[str, Any]) -> None:
        try:
            if self._file is not None:
                self._file.write(json.dumps(values) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("--step-log %s ends here: %s", self._path, error.strerror or error)
        file, self._file = self._file, None
        with suppress(OSError):  # closing writes what is left in the buffer, in vain
            if file is not None:
                file.close()


def read_step_log(path: Path) -> tuple[dict[str, Any], list[StepSample]]:
    """What the engine was, and its steps. Raises StartError that names the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    engine: dict[str, Any] = {}
    samples = []
    names = [field.name for field in fields(StepShape)]
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if number == 1:
                if values.pop("steps_format") != FORMAT:
                    raise ValueError("not this version's format")
                engine = values
                continue
            shape = StepShape(*(values[name] for name in names))
            samples.append(StepSample(shape, float(values["device_s"]), float(values["host_s"])))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else error
            raise StartError(f"{path}, line {number}: no step log: {reason}") from None
    if not engine:
        raise StartError(f"{path}: no step log: it is empty")
    return engine, samples
