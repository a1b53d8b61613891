"""The contract between the scheduler and the runner: one step's work and its result.

A row is one request in one step. Rows with one new token (decode) come first, then longer ones.
Everything per request that stays constant lives in tables on the device that are indexed by the
request's slot; a plan carries only what changed.

Masked rows are those that sample under a grammar. Which tokens it allows depends on all tokens
before, so such a row is planned only when the result of the step that sampled the last of them has
been committed: its mask is always known at launch. With a step in flight it therefore sits out
every second step; the other rows run in each.

Runs on: any (pure).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..api.sampling_params import SamplingParams

FROM_DEVICE = -1  # in StepPlan.tokens: the last token sampled for the row's slot


NONE = np.empty(0, np.int32)  # of rows or pages; nobody writes to a plan's arrays
NO_COPIES = np.empty((2, 0), np.int32)


@dataclass(slots=True)
class Admission:
    """What the runner must know of a request before its first row, or after a retraction.

    Attributes:
        slot: request slot, 1 to max_running (slot 0 pads graph batches and belongs to nobody).
        tokens: prompt and the output so far, int32 [num_tokens] (for the penalties).
        prompt_len: how many of them are prompt.
        stop_token_ids: masked while the output is shorter than params.min_tokens.
        seed: 64 bits, this choice's own.
        grammar: of the Add. `tokens[prompt_len:]` have passed it already.
    """

    slot: int
    params: SamplingParams
    tokens: np.ndarray
    prompt_len: int
    stop_token_ids: tuple[int, ...]
    seed: int
    grammar: Any = None


@dataclass(slots=True)
class StepPlan:
    """One step. Index arrays are int32; `rows` is len(slots).

    Attributes:
        slots: [rows] request slot of each row.
        q_lens: [rows] new tokens of each row, at least 1.
        kv_lens: [rows] context length after this step, new tokens included.
        num_decode_rows: the first rows, those with q_len 1.
        tokens: [num_tokens] ids of the new tokens, row after row; FROM_DEVICE where the id is
            still on the device (the token that the step before samples).
        samples: bool [rows], whether the row reaches the end of its known tokens, so that its
            last position's logits give a new token.
        prompt_logprobs: [rows] how many top log-probabilities are wanted of the prompt tokens
            that follow the row's new tokens; -1 for none.
        score_tokens: row to int32 [q_len], the token that follows each new token in the prompt
            (-1 after the prompt's last), for rows with prompt_logprobs >= 0.
        page_slots, page_indices, page_ids: [n] block-table entries that are new in this step:
            block_table[page_slots, page_indices] = page_ids.
        window_page_ids: [n] the same for the table of layers with a window, where they have pages
            of their own; 0 where a page is gone. Empty otherwise.
        admitted: requests whose per-slot sampling state must be written before this step.
        shared_groups: decode rows whose contexts begin with the same pages, as (row indices
            int32 [k >= 2], shared length in tokens, a multiple of the page size). A kernel may
            read such a prefix once for all of them; ignoring the list is correct too.
        masked: int32 [n], the rows that sample under a grammar.
        state_restores, state_saves: int32 [2, n], copies of recurrent states before and after
            this step, as rows of each LayerState to read from and to write to: from snapshots to
            request slots, and from slots to snapshots. A slot whose context is empty begins with
            a state of zeros, without a copy.
    """

    step: int
    slots: np.ndarray
    q_lens: np.ndarray
    kv_lens: np.ndarray
    num_decode_rows: int
    tokens: np.ndarray
    samples: np.ndarray
    prompt_logprobs: np.ndarray
    page_slots: np.ndarray
    page_indices: np.ndarray
    page_ids: np.ndarray
    window_page_ids: np.ndarray = field(default_factory=lambda: NONE)
    score_tokens: dict[int, np.ndarray] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    shared_groups: list[tuple[np.ndarray, int]] = field(default_factory=list)
    masked: np.ndarray = field(default_factory=lambda: NONE)
    state_restores: np.ndarray = field(default_factory=lambda: NO_COPIES)
    state_saves: np.ndarray = field(default_factory=lambda: NO_COPIES)

    @property
    def num_rows(self) -> int:
        """How many requests are in this step."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed in this step."""
        return len(self.tokens)


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of n positions: chosen float32 [n], top ids and values [n, k]."""

    chosen: np.ndarray
    top_ids: np.ndarray
    top_values: np.ndarray


@dataclass(slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        tokens: int32 [rows], the sampled token of each row; -1 where the row samples nothing.
        is_finite: bool [rows], False where the logits held a NaN or no finite value: that
            request fails, alone.
        seconds: how long the device worked on it; 0 where nobody measured.
        logprobs: of the sampled tokens [rows], where any row asked for them.
        prompt_logprobs: row to the log-probabilities of its score_tokens, [q_len] positions (the
            entry of a -1 means nothing).
    """

    step: int
    tokens: np.ndarray
    is_finite: np.ndarray
    seconds: float = 0.0
    logprobs: Logprobs | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
