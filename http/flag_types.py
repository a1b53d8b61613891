"""Types of the commands' flags: a value out of range is refused where it is given.

Runs on: any (pure).
"""

import argparse
import math
from collections.abc import Callable
from typing import Any


def checked(convert: Callable[[str], Any], is_good: Callable[[Any], bool], want: str) -> Any:
    """A type for argparse: `convert`, then `is_good`, else an error that says what it wants."""

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"want {want}, got {text!r}")
        return value

    return read


positive = checked(float, lambda x: x > 0, "a positive number")
non_negative = checked(float, lambda x: 0 <= x < math.inf, "a number of 0 or more")
positive_int = checked(int, lambda x: x > 0, "a positive integer")
non_negative_int = checked(int, lambda x: x >= 0, "an integer of 0 or more")
share = checked(float, lambda x: 0 < x <= 1, "a share from 0 to 1")
share_or_zero = checked(float, lambda x: 0 <= x <= 1, "a share from 0 to 1, 0 included")
http_url = checked(
    str, lambda x: x.startswith(("http://", "https://")), "http:// or https:// before the host"
)
