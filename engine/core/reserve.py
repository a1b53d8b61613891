"""How much of the KV pool is kept free for the tokens that running requests may still generate.

Most requests stop long before their limit. So only a share of what they may generate is reserved,
and the share falls while decoding goes well. When the bet is lost, a request is retracted and the
share is what the survivors' outputs suggest. Constants and formula as in SGLang.

Runs on: any (pure).
"""

from __future__ import annotations

import numpy as np

MAX_RESERVED = 4096  # tokens that are reserved for one request at most, before the ratio
START_RATIO = 0.7
FLOOR_SHARE = 0.14
DECAY_STEPS = 600
STEPS_AFTER_RETRACTION = 20


class Reserve:
    """The share.

    Args:
        conservativeness: multiplies the share at the start and its floor; the share stays below 1.

    Attributes:
        ratio: the share of now.
    """

    def __init__(self, conservativeness: float):
        self._start = min(START_RATIO * conservativeness, 1.0)
        self._floor = self._start * FLOOR_SHARE
        self.ratio = self._start

    def tokens(self, num_left: np.ndarray) -> float:
        """What to reserve for requests that may still generate num_left tokens each."""
        return float(np.minimum(num_left, MAX_RESERVED).sum() * self.ratio)

    def decay(self) -> None:
        """A step decoded without a retraction."""
        self.ratio = max(self._floor, self.ratio - (self._start - self._floor) / DECAY_STEPS)

    def reset(self) -> None:
        """Nothing runs: what was learnt says nothing of the next load."""
        self.ratio = self._start

    def retracted(self, num_survivors: int, num_output: int, max_tokens: int) -> None:
        """A request was retracted; the others have num_output tokens of max_tokens in all."""
        expected = num_output + STEPS_AFTER_RETRACTION * num_survivors
        self.ratio = min(1.0, expected / (max_tokens + 1))
