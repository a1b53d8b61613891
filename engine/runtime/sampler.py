"""From logits to tokens: penalties, masks, biases, the draw, log-probabilities.

Order (as SGLang's): frequency and presence penalties, min_tokens, repetition penalty, logit bias,
the grammar's mask; then, inside the backend's `sample`, temperature, top-k, top-p, min-p and the
draw.
Log-probabilities are of the model's own distribution, before all of that.

Runs on: gpu.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...backends.api import Ops, SamplingRows
from ..core.plan import Admission

NO_ROWS = np.empty(0, np.int64)


class SlotTable:
    """Sampling parameters by request slot, as host arrays [num_slots]."""

    def __init__(self, num_slots: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.seeds = np.zeros(num_slots, np.int64)
        self.top_k = np.full(num_slots, vocab_size, np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.prompt_lens = np.zeros(num_slots, np.int32)
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.has_penalties = np.zeros(num_slots, bool)
        self.has_bias = np.zeros(num_slots, bool)
        # The context length from which a row needs nothing but the draw.
        self.plain_from = np.zeros(num_slots, np.int32)

    def write(self, a: Admission) -> None:
        """Set the row of a newly admitted request."""
        slot, p = a.slot, a.params
        self.seeds[slot] = np.uint64(a.seed & (2**64 - 1)).astype(np.int64)
        self.temperature[slot] = 0 if p.is_greedy else p.temperature
        self.top_k[slot] = min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size
        self.top_p[slot] = p.top_p
        self.min_p[slot] = p.min_p
        if p.is_greedy:  # filters keep the likeliest token, so they need not run
            self.top_k[slot], self.top_p[slot], self.min_p[slot] = self.vocab_size, 1, 0
        self.prompt_lens[slot] = a.prompt_len
        self.min_tokens[slot] = p.min_tokens
        self.num_logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self.has_penalties[slot] = p.has_penalties
        self.has_bias[slot] = bool(p.logit_bias)
        is_special = p.has_penalties or p.logit_bias or p.logprobs is not None
        ready = a.prompt_len + p.min_tokens if p.min_tokens else 0
        self.plain_from[slot] = np.iinfo(np.int32).max if is_special else ready


@dataclass(slots=True)
class DeviceLogprobs:
    """Log-probabilities on the device: chosen [n], top ids and values [n, k]."""

    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor


@dataclass(slots=True)
class Sampled:
    """What one step sampled, on the device.

    Attributes:
        tokens: int32 [num_samples]; ~token where the logits that it was drawn from are broken.
        logprob_rows: which of the samples have log-probabilities (host indices).
    """

    tokens: Tensor
    logprob_rows: np.ndarray
    logprobs: DeviceLogprobs | None


class Sampler:
    """Samples one token for each of a step's rows. Keeps what depends on a request's history."""

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int, device: torch.device):
        self._ops = ops
        self._device = device
        self.table = SlotTable(num_slots, vocab_size)
        self._penalties = _Penalties(vocab_size, device)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._stop_ids: dict[int, np.ndarray] = {}

    def admit(self, a: Admission) -> None:
        """Prepare a slot for its new request."""
        self.table.write(a)
        self._penalties.forget(a.slot)
        self._stop_ids.pop(a.slot, None)
        self._bias.pop(a.slot, None)
        if a.params.has_penalties:
            self._penalties.admit(a)
        if a.params.min_tokens:
            self._stop_ids[a.slot] = np.array(a.stop_token_ids, np.int64)
        if a.params.logit_bias:
            ids, values = zip(*a.params.logit_bias.items(), strict=True)
            self._bias[a.slot] = (
                torch.tensor(ids, device=self._device),
                torch.tensor(values, dtype=torch.float32, device=self._device),
            )

    def is_plain(self, slots: np.ndarray, kv_lens: np.ndarray) -> bool:
        """Whether these rows need nothing but the draw."""
        return bool((kv_lens >= self.table.plain_from[slots]).all())

    def draw(self, logits: Tensor, rows: SamplingRows, slots: Tensor, last: Tensor) -> Tensor:
        """Only the draw, as `Sampled.tokens`; each token goes to its slot in `last` too.

        Args:
            logits: float32 [num_rows, vocab]. slots: int64 [num_rows]. last: int64 [num_slots].
        """
        tokens, is_finite = self._ops.sample(logits, rows)
        last[slots] = tokens.long()
        return torch.where(is_finite, tokens, ~tokens)

    def sample(
        self,
        logits: Tensor,
        slots: np.ndarray,
        kv_lens: np.ndarray,
        rows: SamplingRows,
        device_slots: Tensor,
        last: Tensor,
        masked: np.ndarray = NO_ROWS,
        masks: np.ndarray | None = None,
    ) -> Sampled:
        """Draw one token a row, with all that its request asks for.

        Args:
            logits: float32 [num_rows, vocab] (overwritten); rows after len(slots) are padding.
            slots: host int32 [num_samples]; kv_lens: the context's length, so the position of
                the token that is drawn.
            rows, device_slots, last: see `draw`.
            masked, masks: host int array [n], and int32 [n, ceil(vocab / 32)]: the rows under a
                grammar, and which tokens it allows, a bit each.
        """
        table = self.table
        logprob_rows = np.flatnonzero(table.num_logprobs[slots] >= 0)
        own = None
        if len(logprob_rows):
            own = torch.log_softmax(logits[self._index(logprob_rows)], -1)
        penalised = np.flatnonzero(table.has_penalties[slots])
        if len(penalised):
            self._penalties.apply_additive(logits, self._index(penalised), slots[penalised])
        self._mask_stops(logits, slots, kv_lens)
        if len(penalised):
            self._penalties.apply_repetition(logits, self._index(penalised), slots[penalised])
        for row in np.flatnonzero(table.has_bias[slots]):
            ids, values = self._bias[int(slots[row])]
            logits[int(row)].index_add_(0, ids, values)

        if masks is not None:
            mask_logits(logits, masked, masks)

        drawn = self.draw(logits, rows, device_slots, last)
        if len(penalised):
            self._penalties.count(self._tokens_of(drawn, penalised), slots[penalised])
        logprobs = None
        if own is not None:
            top = int(table.num_logprobs[slots].max())
            logprobs = top_logprobs(own, self._tokens_of(drawn, logprob_rows), top)
        return Sampled(drawn, logprob_rows, logprobs)

    def _tokens_of(self, drawn: Tensor, rows: np.ndarray) -> Tensor:
        tokens = drawn[self._index(rows)].long()
        return torch.where(tokens < 0, ~tokens, tokens)

    def _mask_stops(self, logits: Tensor, slots: np.ndarray, kv_lens: np.ndarray) -> None:
        """Forbid the stop tokens of rows that have not reached min_tokens."""
        num_output = kv_lens - self.table.prompt_lens[slots]
        early = np.flatnonzero(num_output < self.table.min_tokens[slots])
        stops = [self._stop_ids[int(slots[row])] for row in early]
        if sum(map(len, stops)):
            at = np.repeat(early, [len(s) for s in stops])
            logits[self._index(at), self._index(np.concatenate(stops))] = -torch.inf

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device, non_blocking=True)


def mask_logits(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """Forbid what masks forbid: bit t % 32 of word t // 32 is 0.

    Args:
        logits: float32 [num_rows, vocab], overwritten. rows: ascending [n].
        masks: host int32 [n, ceil(vocab / 32)].
    """
    vocab, device = logits.shape[1], logits.device
    if device.type == "cpu":  # in numpy, whose one thread waits for no other
        forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, count=vocab, bitorder="little")
        values = logits.numpy()
        for row, where in zip(rows.tolist(), forbidden.view(np.bool_), strict=True):
            np.copyto(values[row], -np.inf, where=where)
        return
    words = torch.from_numpy(masks).pin_memory().to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    is_forbidden = ((words[:, :, None] >> shifts) & 1 == 0).flatten(1)[:, :vocab]
    if len(rows) == rows[-1] + 1:  # the first rows: no need to gather them
        logits[: len(rows)].masked_fill_(is_forbidden, -torch.inf)
    else:
        at = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
        logits[at] = logits[at].masked_fill_(is_forbidden, -torch.inf)


def top_logprobs(own: Tensor, tokens: Tensor, top: int) -> DeviceLogprobs:
    """The tokens' entries of log-probabilities [n, vocab], and the `top` largest of each row."""
    values, ids = own.topk(top, -1)
    return DeviceLogprobs(own.gather(-1, tokens[:, None])[:, 0], ids, values)


class _Penalties:
    """Token counts of the requests with penalties, a row each in tables [capacity, vocab]."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._device = device
        self._row_of: dict[int, int] = {}  # slot to row
        self._free: list[int] = []
        self._output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._is_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._params = torch.zeros(0, 3, device=device)  # frequency, presence, repetition

    def forget(self, slot: int) -> None:
        if (row := self._row_of.pop(slot, None)) is not None:
            self._free.append(row)

    def admit(self, a: Admission) -> None:
        if not self._free:
            self._grow()
        row = self._row_of[a.slot] = self._free.pop()
        tokens = torch.from_numpy(a.tokens.astype(np.int64)).to(self._device)
        output = tokens[a.prompt_len :]
        self._output_counts[row] = torch.bincount(output, minlength=self._vocab_size)
        self._is_seen[row] = torch.bincount(tokens, minlength=self._vocab_size) > 0
        p = a.params
        self._params[row] = torch.tensor(
            [p.frequency_penalty, p.presence_penalty, p.repetition_penalty]
        )

    def apply_additive(self, logits: Tensor, rows: Tensor, slots: np.ndarray) -> None:
        at = self._rows(slots)
        counts = self._output_counts[at]
        frequency, presence, _ = self._params[at].split(1, dim=1)
        logits[rows] -= frequency * counts + presence * (counts > 0)

    def apply_repetition(self, logits: Tensor, rows: Tensor, slots: np.ndarray) -> None:
        at = self._rows(slots)
        repetition = torch.where(self._is_seen[at], self._params[at, 2:], 1.0)
        chosen = logits[rows]
        logits[rows] = torch.where(chosen < 0, chosen * repetition, chosen / repetition)

    def count(self, tokens: Tensor, slots: np.ndarray) -> None:
        at, tokens = self._rows(slots), tokens.long()
        self._output_counts[at, tokens] += 1
        self._is_seen[at, tokens] = True

    def _rows(self, slots: np.ndarray) -> Tensor:
        return torch.tensor([self._row_of[int(s)] for s in slots], device=self._device)

    def _grow(self) -> None:
        old = len(self._params)
        new = max(4, old)
        self._free += range(old, old + new)
        for name in ("_output_counts", "_is_seen", "_params"):
            table = getattr(self, name)
            setattr(self, name, torch.cat([table, table.new_zeros(new, table.shape[1])]))
