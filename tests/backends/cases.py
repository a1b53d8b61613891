"""The contract's case builders, which live in the package for `stoker check-backend`."""

from stoker.backends.contract.cases import (  # noqa: F401
    ORACLE,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    attention_cases,
    build_attention,
    make_rope,
    moved,
    oracle_inputs,
    random_experts,
    sampling_rows,
    tree_cases,
)
