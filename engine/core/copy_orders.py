"""What the cache tiers want copied, and the fact that tells them of the end.

    Save    device page -> host slot      Find    which keys the stores have
    Load    host slot -> device page      Fetch   store -> host slot
                                          Put     host slot -> stores

Runs on: any (pure).
"""

from dataclasses import dataclass

import numpy as np

MISSING, DAMAGED = -1, -2  # in Copied.results


@dataclass(frozen=True, slots=True)
class Save:
    """Copy device pages int32 [n] to host slots int32 [n]."""

    order_id: int
    pages: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class Load:
    """Copy host slots int32 [n] to device pages int32 [n]."""

    order_id: int
    slots: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True, slots=True)
class Find:
    """Say how many of the first keys the stores have."""

    order_id: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring pages from the stores to host slots."""

    order_id: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """Bring pages from host slots to the stores."""

    order_id: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


Order = Save | Load | Find | Fetch | Put


@dataclass(frozen=True, slots=True)
class Copied:
    """An order has ended.

    Attributes:
        results: of a Find: how many of the first keys are there, alone. Of a Fetch: for each key
            the number of the store it came from, MISSING or DAMAGED. Of a Put: for each key
            whether any store took it.
    """

    order_id: int
    results: tuple[int, ...] = ()
