"""Token ids as a model's files name them.

Runs on: any (pure).
"""

from typing import Any

from .errors import StartError


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Of a field that holds one, a list of them, or null.

    Args:
        where: the file and the field, for the message.

    Raises:
        StartError: something else stands there. How large a vocabulary is, is not known here.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):  # bool is an int, too
        raise StartError(f"{where} is {value!r:.80}: want token ids, whole numbers from 0 on")
    return tuple(ids)
