"""Whether this build of torch has an op that not every build has.

Runs on: gpu.
"""

import logging
from collections.abc import Callable

from torch import Tensor

logger = logging.getLogger(__name__)


def attempt(name: str, product: Callable[[], Tensor]) -> Tensor | None:
    """What a small product gives; None, which the log tells, where torch lacks an op that it calls.

    Args:
        name: of what is tried, for the log.
    """
    try:
        return product()
    except (AttributeError, RuntimeError) as error:  # no such op, or none for this type
        reason = next(iter(str(error).splitlines()), "")
        logger.info("this build of torch has no %s: %s", name, reason)
        return None
