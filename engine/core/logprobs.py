"""Log-probabilities on their way from a step's arrays into messages.

Runs on: any (pure).
"""

from __future__ import annotations

from ..api.messages import TokenLogprob
from .plan import Logprobs, StepResult
from .request import Request


def prompt_logprobs_of_row(
    request: Request, result: StepResult, row: int, start: int, kv_len: int
) -> None:
    """Note the log-probabilities of the prompt tokens behind a row's new ones, from `start` on."""
    if request.prompt_logprobs is None:
        return
    k = request.add.params.prompt_logprobs or 0
    scores = result.prompt_logprobs[row]
    end = min(kv_len, request.prompt_len - 1)
    request.prompt_logprobs[start + 1 : end + 1] = [
        _token_logprob(scores, i, k) for i in range(end - start)
    ]


def logprobs_of_row(
    request: Request, result: StepResult, row: int
) -> tuple[tuple[TokenLogprob, ...] | None, tuple[TokenLogprob | None, ...] | None]:
    """The new token's log-probabilities, and the prompt's where they were not sent yet."""
    k = request.add.params.logprobs
    if k is None:
        return None, take_prompt_logprobs(request)
    assert result.logprobs is not None
    return (_token_logprob(result.logprobs, row, k),), take_prompt_logprobs(request)


def take_prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...] | None:
    """What is to be sent of the prompt's log-probabilities: all of them, once."""
    logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return None if logprobs is None else tuple(logprobs)


def _token_logprob(logprobs: Logprobs, i: int, k: int) -> TokenLogprob:
    return TokenLogprob(
        float(logprobs.chosen[i]),
        tuple(logprobs.top_ids[i, :k].tolist()),
        tuple(logprobs.top_values[i, :k].tolist()),
    )
