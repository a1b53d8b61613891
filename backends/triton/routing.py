"""The choice of each token's experts.

Runs on: gpu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import RouterSpec


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    stride_logits,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token: the expert of the best score, lowest id first, TOP_K times over.

    NaN counts as -inf; once nothing larger is left, expert 0 is chosen again.
    """
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    e = g[:, None] * SIZE + s[None, :]
    live = (g < NUM_GROUPS)[:, None] & (s < SIZE)[None, :]
    none = float("-inf")
    x = tl.load(logits_ptr + token * stride_logits + e, mask=live, other=none).to(tl.float32)
    if IS_SOFTMAX:
        x = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = x / tl.sum(tl.sum(x, 1), 0)
    else:
        scores = tl.sigmoid(x)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + e, mask=live, other=0.0)
    choice = tl.where(live & (choice == choice), choice, none)
    if NUM_GROUPS > 1:
        group_score = tl.max(choice, 1)
        if HAS_BIAS:  # the best two
            best = tl.min(tl.where(choice == group_score[:, None], e, NUM_EXPERTS), 1)
            group_score += tl.max(tl.where(e == best[:, None], none, choice), 1)
        is_chosen = g < 0
        for _ in tl.static_range(TOP_GROUPS):
            left = tl.where(is_chosen | (g >= NUM_GROUPS), none, group_score)
            top = tl.max(left, 0)
            group = tl.min(tl.where((left == top) & (is_chosen == 0), g, NUM_GROUPS), 0)
            is_chosen = is_chosen | (g == group)
        choice = tl.where(is_chosen[:, None], choice, none)

    WIDTH: tl.constexpr = TOP_K + NUM_SHARED
    j = tl.arange(0, triton.next_power_of_2(WIDTH))
    ids = NUM_EXPERTS + j - TOP_K
    weights = j.to(tl.float32) * 0.0
    for rank in tl.static_range(TOP_K):
        top = tl.max(tl.max(choice, 1), 0)
        expert = tl.min(tl.min(tl.where(choice == top, e, NUM_EXPERTS), 1), 0)
        is_it = e == expert
        weight = tl.sum(tl.sum(tl.where(is_it & live, scores, 0.0), 1), 0)
        ids = tl.where(j == rank, expert, ids)
        weights = tl.where(j == rank, weight, weights)
        choice = tl.where(is_it, none, choice)
    if RENORMALIZE:
        weights /= tl.maximum(tl.sum(weights, 0), 1e-20)
    of_shared = 1.0
    if HAS_SHARED_GATE:
        gate = tl.load(logits_ptr + token * stride_logits + NUM_EXPERTS).to(tl.float32)
        of_shared = tl.sigmoid(gate)
    weights = tl.where(j < TOP_K, weights * scale, of_shared)
    tl.store(ids_ptr + token * WIDTH + j, ids, mask=j < WIDTH)
    tl.store(weights_ptr + token * WIDTH + j, weights, mask=j < WIDTH)


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Expert ids int32 and weights float32, [num_tokens, top_k + num_shared] each."""
    num_tokens, num_experts = logits.shape
    num_experts -= spec.has_shared_gate
    assert logits.stride(1) == 1 and num_experts % spec.num_groups == 0
    shape = num_tokens, spec.top_k + spec.num_shared
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            bias if bias is not None else logits,
            ids,
            weights,
            spec.scale,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=spec.top_k,
            NUM_GROUPS=spec.num_groups,
            TOP_GROUPS=spec.top_groups,
            NUM_SHARED=spec.num_shared,
            HAS_SHARED_GATE=spec.has_shared_gate,
            BLOCK_G=triton.next_power_of_2(spec.num_groups),
            BLOCK_S=triton.next_power_of_2(num_experts // spec.num_groups),
            IS_SOFTMAX=spec.scoring == "softmax",
            HAS_BIAS=bias is not None,
            RENORMALIZE=spec.renormalize,
            num_warps=1,
        )
    return ids, weights
