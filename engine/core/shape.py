"""How large a step is: the counts that its time depends on.

Runs on: any (pure).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from .plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step.

    Attributes:
        tokens: new tokens, of decode rows and chunks.
        decode_rows: rows of one token.
        logit_rows: rows that are sampled.
        decode_context: tokens whose KV decode rows read, a shared prefix counted once.
        repeated_context: what is read again where each row reads a shared prefix for itself.
        chunk_context: tokens whose KV the chunks read, their own included.
        chunk_pairs: pairs of a chunk's new token and a token that it attends to.
    """

    tokens: int
    decode_rows: int
    logit_rows: int
    decode_context: int
    repeated_context: int
    chunk_context: int
    chunk_pairs: float

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        """The size of a plan."""
        n = plan.num_decode_rows
        repeated = sum((len(rows) - 1) * shared for rows, shared in plan.shared_groups)
        q_lens, kv_lens = plan.q_lens[n:].astype(np.float64), plan.kv_lens[n:]
        return cls(
            tokens=plan.num_tokens,
            decode_rows=n,
            logit_rows=int(plan.samples.sum()),
            decode_context=int(plan.kv_lens[:n].sum()) - repeated,
            repeated_context=repeated,
            chunk_context=int(kv_lens.sum()),
            chunk_pairs=float((q_lens * (kv_lens - (q_lens - 1) / 2)).sum()),
        )

    @classmethod
    def chunk(cls, q_len: int, context: int) -> StepShape:
        """A step of one chunk that ends a prompt."""
        end = context + q_len
        pairs = q_len * (end - (q_len - 1) / 2)
        return cls(q_len, 0, 1, 0, 0, end, pairs)

    @classmethod
    def decode(cls, rows: int, context: int) -> StepShape:
        """A step of `rows` decode rows, each after `context` tokens of its own."""
        return cls(rows, rows, rows, rows * (context + 1), 0, 0, 0.0)

    def counts(self) -> tuple[float, ...]:
        """The numbers, in the order of the attributes."""
        return astuple(self)
