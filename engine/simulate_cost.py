"""How long a step takes, as the simulator believes: fitted to measured steps.

Runs on: any (pure).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .api.errors import StartError
from .core.shape import StepShape
from .step_log import StepSample

KNOTS = (8, 32, 128, 256, 512, 2048)  # tokens at which the cost of one more may rise
MIN_STEPS = 20
OUTLIER = 4.0  # a step this many times slower than predicted compiled something, or lost its core
FIT_ROUNDS = 4


class CostModel(Protocol):
    """What the simulator asks of a device."""

    @property
    def is_async(self) -> bool:
        """Whether the device works beside the GPU thread, one step ahead."""

    def device_s(self, shape: StepShape) -> float:
        """Seconds that the device works on a step."""

    def host_s(self, shape: StepShape) -> float:
        """Seconds of the GPU thread's own work: plan, launch, commit."""


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A cost model learnt from a step log.

    Device time is a convex, piecewise linear function of the step's tokens, flat where reading the
    weights bounds it and rising where arithmetic does, plus linear terms in the other counts of
    StepShape. No coefficient is negative, so a larger step is never cheaper.

    Attributes:
        device, host: coefficients of `_features`.
        num_steps, num_outliers: measured steps, and those of them that were left out.
        error: mean of |predicted - measured| / measured over the steps that were kept.
    """

    is_async: bool
    device: np.ndarray
    host: np.ndarray
    num_steps: int
    num_outliers: int
    error: float

    def device_s(self, shape: StepShape) -> float:
        """Seconds that the device works on a step."""
        return float(_features(shape) @ self.device)

    def host_s(self, shape: StepShape) -> float:
        """Seconds of the GPU thread's own work."""
        return float(_features(shape) @ self.host)


def fit(samples: Sequence[StepSample], *, is_async: bool) -> FittedCost:
    """Fit the costs by least squares of relative errors. StartError for too few steps."""
    if len(samples) < MIN_STEPS:
        raise StartError(
            f"the step log has {len(samples)} steps, a fit needs {MIN_STEPS} or more, of as many "
            "sizes as will be simulated"
        )
    x = np.array([_features(sample.shape) for sample in samples])
    device_s = np.maximum([sample.device_s for sample in samples], 1e-7)
    host_s = np.maximum([sample.host_s for sample in samples], 1e-7)
    device, kept = _fit(x, device_s)
    host, _ = _fit(x[:, :2], host_s)
    error = np.abs(x[kept] @ device / device_s[kept] - 1).mean()
    return FittedCost(
        is_async,
        device,
        np.append(host, np.zeros(x.shape[1] - 2)),
        len(samples),
        int((~kept).sum()),
        float(error),
    )


def _features(shape: StepShape) -> np.ndarray:
    tokens, *others = shape.counts()
    hinges = [max(tokens - knot, 0.0) for knot in KNOTS]
    return np.array([1.0, tokens, *others, *hinges])


def _fit(x: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients, and which steps were kept.

    Errors are weighed by the prediction, not by the measured time: with noise that would favour
    the fast steps, and the sum of all steps would come out too short.
    """
    kept = np.ones(len(seconds), bool)
    weights = 1 / seconds
    coefficients = np.zeros(x.shape[1])
    for _ in range(FIT_ROUNDS):
        w = weights[kept]
        coefficients = nonnegative_least_squares(x[kept] * w[:, None], seconds[kept] * w)
        predicted = np.maximum(x @ coefficients, 1e-7)
        kept = seconds <= OUTLIER * predicted
        weights = 1 / predicted
    return coefficients, kept


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min |a x - b| with x >= 0, by active sets (Lawson and Hanson 1974, chapter 23).

    Args:
        a: [m, n]. b: [m].

    Returns:
        x: [n].
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    n = a.shape[1]
    x = np.zeros(n)
    is_free = np.zeros(n, bool)
    tolerance = 1e-9 * max(np.abs(a.T @ b).max(initial=0.0), 1e-300)
    for _ in range(10 * n):
        gradient = np.where(is_free, -np.inf, a.T @ (b - a @ x))
        if is_free.all() or gradient.max() <= tolerance:
            break
        is_free[gradient.argmax()] = True
        while True:
            trial = np.zeros(n)
            trial[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
            falls = is_free & (trial <= 0)
            if not falls.any():
                break
            # Go towards the trial until the first coefficient reaches zero, and fix that one.
            steps = x[falls] / np.maximum(x[falls] - trial[falls], 1e-300)
            x += steps.min() * (trial - x)
            is_free &= x > 1e-14
            x[~is_free] = 0.0
        x = trial
    return x / scale
