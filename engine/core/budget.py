"""How much of a prompt fits beside running streams: a step's time, learnt and predicted.

A step's time is close to linear in two counts: its tokens (matrix products) and its pairs of a new
token and a context token (attention). The coefficients are fitted to the steps that ran, recent
ones weighing more, so the limit holds on any device and model.

Runs on: any (pure).
"""

import math

import numpy as np

MEMORY = 0.98  # what a step's weight is multiplied by for each later step
PAIR_UNIT = 1e6  # pairs are counted in millions, so that the fit is well conditioned
MIN_CHUNK = 128  # tokens that a prompt advances in any case, or it would never end
ROUNDING = 64  # longer chunks are cut to a multiple: matrix products work in tiles
LONG_ROUNDING = 256  # what long ones are cut to: captured steps have few sizes
FULL_BACKLOG = 32768  # waiting tokens, uncached as it seems, at which steps are stretched most
STEPS_UNTIL_LARGER = 64  # after a step that ran out of memory, until twice as much is tried


class StepCost:
    """seconds = base + per_token * tokens + per_pair * pairs, by weighted least squares."""

    def __init__(self) -> None:
        self._normal = np.diag([1e-9, 1e-9, 1e-9])
        self._target = np.zeros(3)
        self._num_seen = 0
        self.base_s = self.per_token_s = self.per_pair_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to predict anything."""
        return self._num_seen >= 3

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """A step of this size took so long."""
        x = np.array([1.0, num_tokens, num_pairs / PAIR_UNIT])
        weight = 1 / max(seconds, 1e-6) ** 2  # relative errors count, not those of long steps
        self._normal = self._normal * MEMORY + weight * np.outer(x, x)
        self._target = self._target * MEMORY + weight * seconds * x
        self._num_seen += 1
        scale = np.sqrt(np.diag(self._normal))  # a plain ridge would weigh the counts unequally
        normal = self._normal / np.outer(scale, scale) + 1e-4 * np.eye(3)
        base, per_token, per_pair = np.linalg.solve(normal, self._target / scale) / scale
        self.base_s, self.per_token_s = max(base, 0.0), max(per_token, 0.0)
        self.per_pair_s = max(per_pair / PAIR_UNIT, 0.0)

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """The predicted time of a step."""
        return self.base_s + self.per_token_s * num_tokens + self.per_pair_s * num_pairs

    def chunk_within(self, seconds: float, context: int) -> int:
        """The most tokens after a context that take no longer than this, beside the base."""
        linear = self.per_token_s + self.per_pair_s * context
        if seconds <= 0:
            return 0
        if self.per_pair_s * seconds < 1e-6 * linear**2:
            return int(min(seconds / linear, 2**30)) if linear > 0 else 2**30
        root = math.sqrt(linear**2 + 2 * self.per_pair_s * seconds)
        return int((root - linear) / self.per_pair_s)


class StepBudget:
    """What is left of one step's tokens and time."""

    def __init__(self, num_tokens: int, cost: StepCost | None, seconds: float):
        self.num_tokens = num_tokens
        self._cost = cost
        self._seconds = seconds
        self._taken = 0  # tokens

    @property
    def is_spent(self) -> bool:
        """Whether no further prompt can begin in this step."""
        return self.num_tokens == 0 or (self._taken > 0 and self._fitting(0) == 0)

    def chunk(self, wanted: int, context: int) -> int:
        """How many of a prompt's next tokens may be computed after its context."""
        q_len = min(wanted, self.num_tokens)
        fits = self._fitting(context)
        if fits < q_len:
            q_len = min(q_len, max(fits, 0 if self._taken else MIN_CHUNK))
        return q_len

    def _fitting(self, context: int) -> int:
        """Tokens that fit the time, such that the step's tokens are a round number in all."""
        if self._cost is None:
            return self.num_tokens
        fits = self._cost.chunk_within(self._seconds, context)
        total = self._taken + fits
        multiple = LONG_ROUNDING if total >= 2 * LONG_ROUNDING else ROUNDING
        return max(fits - total % multiple, 0)

    def spend(self, q_len: int, context: int) -> None:
        """A chunk was taken."""
        self.num_tokens -= q_len
        self._taken += q_len
        if self._cost is not None:
            pairs = pairs_of(q_len, context)
            self._seconds -= self._cost.per_token_s * q_len + self._cost.per_pair_s * pairs


def calibration_chunks(limit: int) -> list[tuple[int, int]]:
    """(tokens, context) of the chunks that are timed at the start, each within `limit` tokens."""
    sizes = [(n, 0) for n in (128, 512, 1024, 2048, 4096) if n <= limit]
    return sizes + [(n // 4, n - n // 4) for n, _ in sizes[-2:]]


class StepLimits:
    """How much a step may hold: for the running streams' sake, and for the device's memory's.

    Args:
        max_tokens: new tokens a step; running streams come first, chunks fill the rest.
        max_step_s: while streams run, chunks are cut so that a step takes no longer than this.
        backlog_stretch: how many times max_step_s a step may take when many requests wait: then
            they lose more by short chunks than the running streams gain.
        prefill_decode_interval: while streams run, so many steps without chunks after each with.
        cost: predicts a step's time.

    Attributes:
        num_tokens: what a step may hold for now: less than max_tokens after one ran out of memory.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        max_step_s: float | None = None,
        backlog_stretch: float = 1.0,
        prefill_decode_interval: int = 0,
        cost: StepCost | None = None,
    ):
        self.num_tokens = max_tokens
        self.cost = cost or StepCost()
        self.mean_new_tokens = 0.0  # that a request has to compute, a moving mean
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._backlog_stretch = backlog_stretch
        self._prefill_decode_interval = prefill_decode_interval
        self._steps_until_larger = 0
        self._steps_since_chunks = 2**31

    def budget(self, contexts: np.ndarray, num_waiting: int) -> StepBudget:
        """What chunks may take of a step, beside decode rows after these contexts [rows]."""
        num_rows = len(contexts)
        num_tokens = self.num_tokens - num_rows
        if not num_rows:
            return StepBudget(num_tokens, None, 0.0)
        if self._steps_since_chunks < self._prefill_decode_interval:
            num_tokens = 0
        if self._max_step_s is None or not self.cost.is_known:
            return StepBudget(num_tokens, None, 0.0)
        taken = self.cost.seconds(num_rows, float(contexts.sum()) + num_rows)
        backlog = min(num_waiting * self.mean_new_tokens / FULL_BACKLOG, 1.0)
        limit = self._max_step_s * (1 + (self._backlog_stretch - 1) * backlog)
        return StepBudget(num_tokens, self.cost, limit - taken)

    def admitted(self, num_new_tokens: int) -> None:
        """A request was admitted that has so many tokens to compute."""
        self.mean_new_tokens += 0.1 * (num_new_tokens - self.mean_new_tokens)

    def planned(self, *, has_chunks: bool) -> None:
        """A step is launched."""
        self._steps_since_chunks = 0 if has_chunks else self._steps_since_chunks + 1

    def shrink(self, num_tokens: int) -> None:
        """A step of so many tokens found no memory: the next are half as large."""
        self.num_tokens = max(1, num_tokens // 2)
        self._steps_until_larger = STEPS_UNTIL_LARGER

    def committed(self) -> None:
        """A step ended well: some time after one did not, larger ones are tried."""
        if not self._steps_until_larger:
            return
        self._steps_until_larger -= 1
        if not self._steps_until_larger:
            self.num_tokens = min(2 * self.num_tokens, self._max_tokens)
            if self.num_tokens < self._max_tokens:
                self._steps_until_larger = STEPS_UNTIL_LARGER


def pairs_of(q_len: int, context: int) -> float:
    """Pairs of a new token and a token that it attends to."""
    return q_len * (context + (q_len + 1) / 2)
