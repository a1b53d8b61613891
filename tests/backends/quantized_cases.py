"""The builders of quantized weights, which live in the package for `stoker check-backend`."""

from stoker.backends.contract.quantized import (  # noqa: F401
    CASES,
    QuantizedCase,
    on_device,
    random_quantized,
    random_quantized_experts,
)
