"""Where the backends keep what is worth making once a machine: compiled kernels, measurements.

Runs on: any (pure).
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """STOKER_CACHE, or `stoker` in the user's cache folder."""
    if chosen := os.environ.get("STOKER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"
