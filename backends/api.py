"""The contract between the engine and a backend: one description of a batch, one list of ops.

An op is a function of torch tensors. A *provider* is an object with a name, a `probe` that says
why it cannot run here (or None), and methods named after the ops it has. A backend orders its
providers; for each op the first that can run is chosen, once, at start (`registry.py`), and the
reasons are kept for the log and for `stoker backends`.

Shapes use one vocabulary everywhere:
    num_tokens  new tokens of all rows of the step, one after the other
    rows        requests in the step; the first num_decode_rows have one new token each
    num_pages, page_size    the KV pool: slot = page * page_size + offset holds one token

Runs on: any (pure).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


class BackendError(Exception):
    """A backend or provider cannot run here; the message is one line that says why."""


class LayerCache(NamedTuple):
    """One layer's KV pool: k and v, each [num_pages, page_size, num_kv_heads, head_dim] (NHD).

    With latent attention (MLA), k is [num_pages, page_size, 1, kv_lora_rank + rope_dim], the
    latent first, and v has a last dimension of 0.
    """

    k: Tensor
    v: Tensor


class LayerState(NamedTuple):
    """One layer's recurrent state, by request slot; rows behind the slots hold snapshots.

    Attributes:
        conv: [num_rows, channels, kernel_size - 1] the last inputs of a short convolution.
        recurrent: float32 [num_rows, num_heads, key_dim, value_dim].
    """

    conv: Tensor
    recurrent: Tensor


SHARED_TILE_ROWS = 16  # with 4 query heads a KV head, 64 queries: one tile of a matrix product


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefixes that decode rows share, on the device (int32), in tiles of rows of one group.

    Attributes:
        tile_rows: [num_tiles, SHARED_TILE_ROWS] row numbers, the rest of a tile is -1.
        tile_lens: [num_tiles] tokens that a tile's rows share; 0 for an unused tile.
        row_lens: [rows] tokens of each row's context that its tile covers.
    """

    tile_rows: Tensor
    tile_lens: Tensor
    row_lens: Tensor


@dataclass(slots=True)
class BatchMeta:
    """Who is in the batch. Tensors are on the device, int32 unless said otherwise.

    Attributes:
        qo_indptr: [rows + 1] where each row's new tokens begin.
        kv_lens: [rows] context length, the new tokens included; 0 for a padding row.
        slots: [rows] request slot, the row of block_table.
        block_table: [num_slots, max_pages] page ids of each request slot.
        positions: int64 [num_tokens] position of each new token in its context.
        out_slots: int64 [num_tokens] KV slot that each new token's K and V go to; -1 for nowhere.
        logit_tokens: int64 [num_logits] index into the new tokens, whose logits are wanted.
        qo_indptr_cpu, kv_lens_cpu: the same as numpy arrays on the host.
        max_kv_len: a host integer; inside a captured graph it is an upper bound.
        tree_mask: bool [sum of q_len * kv_len], row after row, for verification; None is causal.
        shared: pages that several decode rows begin with. A kernel may read such a prefix once
            for all of them; ignoring it is correct too.
        windowed: the same batch for layers with a window, where they have a page pool of their own:
            its block_table and out_slots are that pool's. Where no new token sees a page any more,
            the table holds page 0, which is nobody's.
        plans: what a provider derives from this description, keyed by the provider's name (and
            more, where it likes), so that every layer uses it again; `indices.row_tables` is
            anybody's.
    """

    num_rows: int
    num_tokens: int
    num_decode_rows: int
    page_size: int
    qo_indptr: Tensor
    kv_lens: Tensor
    slots: Tensor
    block_table: Tensor
    positions: Tensor
    out_slots: Tensor
    logit_tokens: Tensor
    qo_indptr_cpu: np.ndarray
    kv_lens_cpu: np.ndarray
    max_kv_len: int
    tree_mask: Tensor | None = None
    shared: SharedPrefixes | None = None
    windowed: BatchMeta | None = None
    plans: dict[Any, Any] = field(default_factory=dict)

    def of(self, window: int | None) -> BatchMeta:
        """The batch as a layer with this window is to see it."""
        return self if window is None or self.windowed is None else self.windowed


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention layer does besides softmax(q k^T * scale) v with a causal mask.

    Attributes:
        window: a token sees itself and the window - 1 tokens before it; None sees all.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.
        sinks: [num_heads] a learned logit per head that joins the softmax's denominator.
        kv_dtype: an fp8 type that keys and values are stored in; None for the model's own.
        k_scale, v_scale: what values of an fp8 cache are multiplied by when read, and divided by
            when written.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    kv_dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: cos_sin float32 [max_positions, rotary_dim], cosines then sines.

    The first rotary_dim dimensions of a head rotate, as two halves, or as neighbouring pairs
    where interleaved.
    """

    cos_sin: Tensor
    rotary_dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with its up-projections absorbed.

    Attributes:
        scale: multiplies q k^T.
        rank: of the latent, which is both part of the key and the value.
        rope_dim: of the key's part that rotates, one for all heads.
        nope_dim, value_dim: of what the up-projections make of a latent for each head, the rest
            of its key and its value.
    """

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float


class DenseRows(NamedTuple):
    """Rows whose keys lie one row after the other, without pages. All int32, on the device.

    Attributes:
        qo_indptr, kv_indptr: [rows + 1] where each row's new tokens begin, and its keys.
        offsets: [rows] how far the first new token is behind the first of these keys in the
            context: new token i sees the keys up to offset + i, which may be none or all.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetSpec:
    """A gated delta net (Yang et al. 2024) between its projections.

    Attributes:
        num_key_heads: of q and k; each serves num_value_heads / num_key_heads value heads.
        key_dim, value_dim: of one head.
        conv: [channels, kernel_size] weights of a causal convolution over each channel: those of
            all heads' q, then k, then v.
        decay: float32 [num_value_heads], -exp(A_log); what softplus(a + dt_bias) is multiplied by.
        dt_bias: float32 [num_value_heads].
        norm: [value_dim] weight of the RMS norm of each head's output.
        eps: of that norm.
        interleaved: the projections' columns are those of a key head (q, k, its v's and z's; its
            b's and a's), then of the next; else q of all heads, then k, v and z; b, then a.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    interleaved: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out, in], or [num_experts, out, in], in few bits: value = code * scale + offset.

    Attributes:
        kind: "fp8": codes float8_e4m3fn [out, in]. "int8": int8 [out, in]. "uint4": uint8
            [out, in / 2], two codes 0 to 15 a byte, the lower half first. "mxfp4": the same with
            codes that stand for e2m1 floats. "gguf": raw rows uint8 [out, row_bytes] of gguf_type.
        scales: float32 [ceil(out / block[0]), ceil(in / block[1])], one for each block of codes;
            None for "gguf".
        offsets: the same shape, None for zero.
        has_zero_points: of "uint4": every offset is -scale times an integer from 0 to 16, as in
            AWQ and GPTQ, so that value = (code - zero point) * scale.
        block: (rows, columns) that share a scale: (out, in) a tensor, (1, in) a channel,
            (128, 128), (1, group).
        activations: how the input is rounded to the codes' type before the product: not at all
            (None), by input_scale ("tensor"), or by a scale that is measured for each "token", or
            for each "group" of block[1] columns of a token.
        input_scale: float32 [1], where activations are "tensor".
        order: int32 [in], which input each column of the codes belongs to (GPTQ's act-order).
        gguf_type: "Q4_0", "Q4_K", ...
        dtype: of the activations, where it is known when the weight is packed.

    Of experts, codes, scales, offsets and order have num_experts in front.
    """

    kind: Literal["fp8", "int8", "uint4", "mxfp4", "gguf"]
    codes: Tensor
    shape: tuple[int, ...]
    scales: Tensor | None = None
    offsets: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    activations: Literal["tensor", "token", "group"] | None = None
    input_scale: Tensor | None = None
    order: Tensor | None = None
    gguf_type: str = ""
    dtype: torch.dtype | None = None
    has_zero_points: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A pre-norm decoder layer: norm, attention, norm, gated MLP.

    Attributes:
        input_norm, mlp_norm: weights of the norms before attention and MLP.
        attention_out_norm, mlp_out_norm: of norms behind them (Gemma's sandwich), or None.
        qkv, out, gate_up, down: packed linears.
        activation: "silu" or "gelu_tanh".
    """

    spec: AttentionSpec
    rope: Rope | None
    eps: float
    activation: str
    input_norm: Tensor
    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Any
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    mlp_out_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts follow from its router logits; see `ReferenceOps.route`.

    Attributes:
        top_k: experts a token.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        num_groups: into how many groups of neighbours the experts are divided.
        top_groups: of how many groups a token's experts may come.
        renormalize: whether a token's weights are divided by their sum. A softmax over the chosen
            logits alone (gpt-oss, Mixtral) is this, too.
        scale: multiplies the weights in the end.
        num_shared: experts behind those of the logits that every token has, too, after its top_k,
            with a weight of 1.
        has_shared_gate: their weight is the sigmoid of one logit behind the experts' instead.
    """

    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    num_shared: int = 0
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The gated MLPs of a layer: down(activation(gate(x), up(x))).

    Attributes:
        gate_up: [num_experts, 2 * inner, hidden], the gate's half first.
        down: [num_experts, hidden, inner].
        activation: "silu" or "gelu_tanh" of the gate, times up; or "swiglu_clamped" (gpt-oss):
            gate * sigmoid(1.702 * gate) * (up + 1), gate at most 7, up between -7 and 7.
        gate_up_bias, down_bias: [num_experts, 2 * inner] and [num_experts, hidden], or None.
    """

    gate_up: Tensor
    down: Tensor
    activation: str = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedExperts:
    """ExpertWeights whose gate_up and down are quantized, [num_experts, out, in] each."""

    gate_up: QuantizedWeight
    down: QuantizedWeight
    activation: str = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Ops(Protocol):
    """The ops of a backend. Each is documented by its float64 reference in `reference.py`.

    Attributes:
        gguf_types: types of GGUF blocks that are multiplied packed, at least as fast as floats.
        float32_residual: the residual stream, alone, is to be float32 where activations are not:
            what many layers add up in bfloat16 loses digits that decide between near ties. Ops
            that say x is a residual take it so, and round what they norm to the weight's type.
        replan: where attention needs it, called with a captured step's batch and its rows'
            context lengths of this time (host ints, without padding) before each replay.
    """

    gguf_types: Set[str]
    float32_residual: bool
    replan: Callable[[BatchMeta, np.ndarray], None] | None

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Bring a weight [out, in] into the form that `linear` wants. Called once, at load."""

    def linear(self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """[num_tokens, in] times a packed weight, plus its bias: [num_tokens, out].

        The result has x's type, or out_dtype where given (logits are wanted in float32).
        """

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        packed: Any,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """linear(rms_norm(x)) of a residual, in one kernel where the rows are few; x stays."""

    def norm_gated_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, packed: Any, activation: str
    ) -> Tensor:
        """silu_and_mul or gelu_and_mul of norm_linear, for a weight [2 n, in]: [num_tokens, n].

        Args:
            activation: "silu" or "gelu_tanh".
        """

    def linear_add(self, x: Tensor, packed: Any, residual: Tensor) -> None:
        """residual += linear(x), in place, rounded once or twice."""

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Any:
        """Bring a quantized weight into the form that `quantized_linear` wants, once, at load.

        Where that form has an attribute `is_linear` that is true, `linear` and the ops that are
        made of it (`norm_linear`, `decoder_layer`, ...) take it as well.

        Raises:
            BackendError: no kernel here takes a weight of this kind.
        """

    def pack_quantized_rows(self, weights: Sequence[QuantizedWeight], bias: Tensor | None) -> Any:
        """One packed weight out of several of different types, whose rows follow each other.

        Optional. Raises BackendError as `pack_quantized` does.
        """

    def quantized_linear(
        self, x: Tensor, packed: Any, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Like `linear`, of a quantized weight.

        A provider may leave activations as they are where rounding them gains nothing.
        """

    def quantized_rows(self, packed: Any, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Values [n, in] of some rows, int64 [n], of a packed GGUF weight. Optional."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, any leading shape; computed in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; then rms_norm(residual), in x's type."""

    def write_qkv(
        self,
        qkv: Tensor,
        meta: BatchMeta,
        cache: LayerCache,
        spec: AttentionSpec,
        rope: Rope | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norm q and k per head where asked, rotate them, write k and v to meta.out_slots.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; may be overwritten.
            q_norm, k_norm: [head_dim] weights of RMS norms over each head, or None.

        Returns:
            q [num_tokens, num_heads, head_dim].
        """

    def attend(self, q: Tensor, meta: BatchMeta, cache: LayerCache, spec: AttentionSpec) -> Tensor:
        """Attention of the new tokens over their contexts: [num_tokens, num_heads * head_dim].

        Decode, prefill with a cached prefix, and mixtures of both; padding rows give anything.
        """

    def delta_net(
        self, qkvz: Tensor, ba: Tensor, meta: BatchMeta, state: LayerState, spec: DeltaNetSpec
    ) -> Tensor:
        """What lies between a gated delta net's projections: convolution, recurrence, gated norm.

        It reads and writes, in place, the rows meta.slots of the state. A row whose context begins
        with its new tokens (kv_len == q_len) begins with zeros, whatever is there; padding rows
        give anything, and may write to slot 0.

        Args:
            qkvz: [num_tokens, 2 * num_key_heads * key_dim + 2 * num_value_heads * value_dim].
            ba: [num_tokens, 2 * num_value_heads].

        Returns:
            [num_tokens, num_value_heads * value_dim], in qkvz's type.
        """

    def mla_write(
        self,
        latent: Tensor,
        q_rope: Tensor,
        meta: BatchMeta,
        cache: LayerCache,
        spec: MLASpec,
        rope: Rope,
        norm: Tensor,
        eps: float,
    ) -> None:
        """Write what latent attention keeps of the new tokens to meta.out_slots.

        Args:
            latent: [num_tokens, rank + rope_dim]; an RMS norm is made of the first rank, and the
                rest rotates.
            q_rope: [num_tokens, num_heads, rope_dim], of any strides but the last; rotated in
                place.
            norm: [rank] weight of the norm.
        """

    def mla_attend(
        self, q_latent: Tensor, q_rope: Tensor, meta: BatchMeta, cache: LayerCache, spec: MLASpec
    ) -> Tensor:
        """Latent attention of the new tokens over their contexts, up-projections left outside.

        The latents are keys, beside their rotated part, and values: softmax((q_latent latent^T +
        q_rope k_rope^T) * scale) latent. Decode, prefill, and mixtures, as in `attend`.

        Args:
            q_latent: [num_tokens, num_heads, rank], queries times the keys' up-projection.
            q_rope: [num_tokens, num_heads, rope_dim]. Both of any strides but the last.

        Returns:
            [num_tokens, num_heads, rank].
        """

    def mla_attend_dense(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, rows: DenseRows, spec: MLASpec
    ) -> tuple[Tensor, Tensor]:
        """Attention over up-projected keys and values, for many new tokens. Never captured.

        Args:
            q: [num_tokens, num_heads, nope_dim + rope_dim], the part that rotated last.
            kv: [num_keys, num_heads, nope_dim + value_dim], a head's key and then its value.
            k_rope: [num_keys, rope_dim], of all heads; of any strides but the last.

        Returns:
            [num_tokens, num_heads, value_dim], and the queries' natural log-sum-exps float32
            [num_tokens, num_heads]; 0 and -inf where a token sees none of these keys.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(x[:, :n]) * x[:, n:] for x [num_tokens, 2 n]."""

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """gelu(x[:, :n], tanh form) * x[:, n:] for x [num_tokens, 2 n]."""

    def route(self, logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose experts by router logits float32 [num_tokens, num_experts], or one more of them.

        Args:
            bias: float32 [num_experts] added to the scores for the choice, not to the weights.

        Returns:
            Expert ids int32 [num_tokens, top_k + num_shared], valid ones even where the logits are
            broken, and weights float32 of the same shape.
        """

    def pack_experts(self, weights: ExpertWeights) -> Any:
        """Bring a layer's experts into the form that `experts` wants. Called once, at load."""

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any) -> Tensor:
        """The weighted sum of each token's experts: [num_tokens, hidden], in x's type.

        Args:
            x: [num_tokens, hidden].
            topk_ids: int32 [num_tokens, top_k]. topk_weights: float32 [num_tokens, top_k].
        """

    def norm_experts_add(
        self,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        topk_ids: Tensor,
        topk_weights: Tensor,
        packed: Any,
    ) -> None:
        """residual += experts(rms_norm(residual)), in place. Optional, as decoder_layer is."""

    def pack_quantized_experts(self, weights: QuantizedExperts) -> Any:
        """Bring quantized experts into the form that `quantized_experts` wants, once, at load.

        Raises:
            BackendError: no kernel here takes weights of this kind.
        """

    def quantized_experts(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, packed: Any
    ) -> Tensor:
        """Like `experts`, of quantized weights."""

    def decoder_layer(
        self,
        x: Tensor | None,
        residual: Tensor,
        weights: LayerWeights,
        meta: BatchMeta,
        cache: LayerCache,
    ) -> Tensor:
        """A whole layer out of the ops above. Optional: absent where no provider is better at it.

        Args:
            x: output of the layer before [num_tokens, hidden], None in the first layer.
            residual: [num_tokens, hidden]; x and the attention's output are added in place.

        Returns:
            The layer's output [num_tokens, hidden], not yet added to the residual, in the type of
            the weights.
        """

    def copy_pages(
        self,
        parts: Tensor,
        max_page_bytes: int,
        pages: Tensor,
        records: int,
        record_bytes: int,
        rows: Tensor,
        *,
        to_pool: bool,
        is_host: bool,
    ) -> None:
        """Copy pages of some pools to records that hold them side by side, or back.

        Optional: without it the cache tiers copy through torch.

        Args:
            parts: int64 [num_parts, 3] on the device: a pool's address, its bytes a page, and the
                page's offset in a record; all multiples of 16.
            max_page_bytes: the largest of the bytes a page.
            pages: int32 [n] page ids. rows: int32 [n], which record each page has. On the device.
            records: address of record 0. record_bytes: of each, a multiple of 16.
            to_pool: records to pages, else pages to records.
            is_host: whether the records are in host memory that is registered with the device.
        """

    def sample(self, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """One token a row of logits float32 [rows, vocab].

        They may be overwritten on a device without graphs, and stay as they are on one with.

        The rules, ties included, are those of `ReferenceOps.sample`.

        Returns:
            Tokens int32 [rows], some token where the logits are broken; and bool [rows], whether
            the largest logit is finite and none is NaN.
        """


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters of the rows of a step, on the device.

    The random number of a row depends on (seed, position) alone, never on the batch.

    Attributes:
        temperature, top_p, min_p: float32 [rows]; a greedy row has temperature 0.
        top_k: int32 [rows]; vocab size keeps all.
        seeds: int64 [rows]. positions: int32 [rows], of the token that is sampled.
        all_greedy, has_top_k, has_top_p, has_min_p: whether any row needs the work, known on
            the host.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    all_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What kernels depend on.

    Attributes:
        arch: "sm_90", "gfx942", or the best of a CPU's instruction sets.
        warp_size: threads that run in step; 64 on AMD's CDNA, 1 on a CPU.
        shared_bytes: memory that the threads of a block share, at most (AMD's LDS); 0 on a CPU.
        dist_backend: of torch.distributed.
        has_bf16: whether bfloat16 is multiplied in hardware.
        fp8: the 8-bit float that is multiplied in hardware; None where there is none.
    """

    arch: str
    warp_size: int
    shared_bytes: int
    dist_backend: Literal["nccl", "xccl", "gloo"]
    has_bf16: bool
    fp8: torch.dtype | None = None


class DeviceRuntime(Protocol):
    """One device: memory, streams, and what it can do."""

    name: str  # "cpu" | "cuda" | "rocm" | "xpu"
    device: torch.device
    description: str  # "NVIDIA H200, sm_90, 139 GiB"
    is_async: bool  # launches return before the work is done, so steps can overlap
    has_graphs: bool
    default_page_size: int
    facts: DeviceFacts

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """What --dtype auto means for weights that were saved as model_dtype."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Warm a function up, capture it as a graph, and return what replays it.

        All graphs share one memory pool. Only where has_graphs.
        """


class Provider(Protocol):
    """A source of ops. Methods are named after those of `Ops`; it may have only some.

    One that keeps pages in an order of its own says so in an attribute `kv_layout` (the others'
    is "NHD"), has `from_nhd` and `to_nhd` for a LayerCache, and serves both write_qkv and attend.

    One whose ops take a residual in float32, and should get it so, sets `float32_residual`.

    One whose kernels compile at first use may have `warm_steps(specs, dtype, page_size, device)`:
    functions that launch, between them, what steps with these kinds of attention layers can meet;
    and `mla_warm_steps`, the same for kinds of MLASpec.
    """

    name: str

    def probe(self, runtime: DeviceRuntime) -> str | None:
        """Why it cannot run here, in one line; None if it can."""
