"""Each op of each provider that can run here, against the float64 oracle."""

import pytest
from targets import targets

from stoker.backends.api import BackendError
from stoker.backends.contract.checks import checks

pytestmark = pytest.mark.parametrize("target", targets())


@pytest.mark.parametrize("check", checks(), ids=str)
def test_op(target, check):
    if reason := check.missing(target):
        pytest.skip(reason)
    try:
        assert check.run(target) <= 1
    except BackendError as error:
        pytest.skip(str(error))
