"""How long a step should take: the roofline of a card and the shape of a model.

A step's products take the p-norm of two times, reading the weights and computing with them: near
the knee of the roofline both are felt. Attention takes the larger of reading its KV and computing.
To these come element-wise kernels and fixed times a layer. The efficiencies below make the model
meet what was measured on an H200 with the Llama-3.1-8B shape (docs/performance.md: one stream,
256 streams in process, prompts, one attention layer). Other cards are assumed to reach the same
shares of their data sheets; that is not measured.

Runs on: any (pure).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .api.errors import StartError
from .core.shape import StepShape

READ_WEIGHTS = 0.82  # share of the memory bandwidth that products reach: 3.95 of 4.8 TB/s
READ_KV = 0.885  # that attention reaches: 4.25 of 4.8 TB/s
PRODUCTS = 0.67  # share of the arithmetic peak that large products reach: 666 of 989 TFLOP/s
ATTENTION = 0.52  # that long attention reaches: 514 of 989 TFLOP/s
KNEE = 2.0  # the p of the norm: 128 rows take 4.7 ms where the roofs say 3.8 and 2.9
LAYER_S = 10e-6  # small kernels and gaps, a layer
CHUNK_S = 35e-6  # a pass over chunks takes this beside its work, a layer: 128 tokens in 5.9 ms
SHARED_S = 75e-6  # one over a shared prefix, and joining its results: 64 rows in 7 ms
STREAM_S = 3.2e-6  # a row, where the event loop streams beside: 9.65 ms instead of 8.83 at 256
HOST_S, HOST_ROW_S = 0.35e-3, 3.7e-6  # the GPU thread: 1.3 ms a step at 256 rows
GRAPH_TOKENS = 2048  # longer steps are launched kernel by kernel,
LAUNCH_S = 0.8e-3  # which takes the GPU thread so long, a layer: 25 ms
OTHER_BYTES = 3 << 30  # working memory and captured graphs


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator, by its data sheet: dense bfloat16 arithmetic, memory speed and size."""

    name: str
    flops: float  # a second
    bandwidth: float  # bytes a second
    memory: float  # bytes


CARDS = {
    card.name.lower(): card
    for card in (
        Card("A100", 312e12, 2.039e12, 80e9),
        Card("L4", 121e12, 0.3e12, 24e9),
        Card("L40S", 362e12, 0.864e12, 48e9),
        Card("H100", 989e12, 3.35e12, 80e9),
        Card("H200", 989e12, 4.8e12, 141e9),
        Card("B200", 2250e12, 8.0e12, 180e9),
        Card("MI300X", 1307e12, 5.3e12, 192e9),
        Card("MI325X", 1307e12, 6.0e12, 256e9),
        Card("MI355X", 2500e12, 8.0e12, 288e9),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its speed. Sizes are counts of numbers, not bytes.

    Attributes:
        layer_weights: of all layers, without the experts; every token uses them.
        expert_weights: of one expert in all its layers.
        num_experts, experts_per_token: 0 for a dense model.
        head_weights: of the output layer, which only sampled rows use.
        embedding_weights: where they are not the output layer's own.
        kv_per_token: keys and values, over all layers.
        pair_flops: arithmetic for one new token and one it attends to, over all layers.
        activations_per_token: read and written between products, over all layers.
        window, window_share: the sliding window in tokens, and the share of layers that have one.
    """

    name: str
    num_layers: int
    layer_weights: int
    expert_weights: int
    num_experts: int
    experts_per_token: int
    head_weights: int
    embedding_weights: int
    kv_per_token: int
    pair_flops: int
    activations_per_token: int
    max_model_len: int
    window: int = 0
    window_share: float = 0.0

    @property
    def num_weights(self) -> int:
        """All of them."""
        experts = self.num_experts * self.expert_weights
        return self.layer_weights + experts + self.head_weights + self.embedding_weights

    def weights_read(self, tokens: int) -> float:
        """Weights of the layers that a step of so many tokens reads; each expert once at most.

        Tokens are taken to choose their experts independently and evenly.
        """
        if not self.num_experts:
            return self.layer_weights
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.layer_weights + self.num_experts * (1 - missed) * self.expert_weights

    def context_share(self, mean_context: float) -> float:
        """The share of the context that the layers look at on average."""
        if not self.window_share or mean_context <= self.window:
            return 1.0
        return 1 - self.window_share * (1 - self.window / mean_context)

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> ModelShape:
        """From the fields of a Hugging Face config.json. Raises StartError for a missing one."""
        c = config.get("text_config") or config

        def need(field: str) -> int:
            value = c.get(field)
            if not isinstance(value, int) or value < 1:
                raise StartError(f"{name}: config.json: {field} must be a positive integer")
            return value

        def first(*fields: str, default: int = 0) -> int:
            return next((c[field] for field in fields if isinstance(c.get(field), int)), default)

        hidden, layers, heads = (
            need(field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        kv_heads = first("num_key_value_heads", default=heads)
        head_dim = first("head_dim", default=hidden // heads)
        if rank := first("kv_lora_rank"):  # MLA: one latent vector a token and layer
            nope, rope = need("qk_nope_head_dim"), need("qk_rope_head_dim")
            value = need("v_head_dim")
            q_rank = first("q_lora_rank")
            q_size = heads * (nope + rope)
            queries = q_rank * (hidden + q_size) if q_rank else hidden * q_size
            latents = hidden * (rank + rope) + rank * heads * (nope + value)
            attention = queries + latents + heads * value * hidden
            kv, pair_flops = rank + rope, 2 * heads * (2 * rank + rope)
            qkv = q_size + rank + rope
        else:
            q_size = heads * head_dim
            kv, pair_flops = 2 * kv_heads * head_dim, 4 * q_size
            attention = hidden * (2 * q_size + kv)
            qkv = q_size + kv
        num_experts = first("num_local_experts", "num_experts", "n_routed_experts")
        dense_layers, expert, active, router = layers, 0, 0, 0
        inner = need("intermediate_size")
        if num_experts:
            dense_layers = first("first_k_dense_replace")
            expert_inner = first("moe_intermediate_size", default=inner)
            expert = 3 * hidden * expert_inner
            active = need("num_experts_per_tok")
            shared = first("n_shared_experts") * expert + hidden * num_experts
            router = (layers - dense_layers) * shared
            inner = expert_inner * active
        head = hidden * need("vocab_size")
        types = c.get("layer_types") or []
        window = first("sliding_window")
        windowed = sum("sliding" in str(kind) for kind in types) if types else 0
        return cls(
            name=name,
            num_layers=layers,
            layer_weights=layers * attention
            + dense_layers * 3 * hidden * need("intermediate_size")
            + router,
            expert_weights=(layers - dense_layers) * expert,
            num_experts=num_experts,
            experts_per_token=active,
            head_weights=head,
            embedding_weights=0 if c.get("tie_word_embeddings", True) else head,
            kv_per_token=layers * kv,
            pair_flops=layers * pair_flops,
            # Norms and residual sums touch hidden six times, rotation qkv twice, the gate its
            # inner size three times.
            activations_per_token=layers * (6 * hidden + 2 * qkv + 3 * inner),
            max_model_len=first("max_position_embeddings", default=4096),
            window=window,
            window_share=windowed / layers if window else 0.0,
        )

    @classmethod
    def load(cls, model: str) -> ModelShape:
        """By a name of SHAPES, or out of a config.json or the folder that holds one.

        Raises:
            StartError: there is no such shape or file, or a field is missing.
        """
        if model in SHAPES:
            return cls.from_config(model, SHAPES[model])
        path = Path(model)
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except OSError:
            raise StartError(
                f"no shape {model!r}: want a config.json, its folder, or one of {', '.join(SHAPES)}"
            ) from None
        except ValueError as error:
            raise StartError(f"{file}: {error}") from None
        if not isinstance(config, dict):
            raise StartError(f"{file}: want an object")
        return cls.from_config(path.parent.name if path.is_file() else path.name, config)


def _shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, length: int, **more
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
        **more,
    }


_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256, 131072),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256, 131072),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, 151936, 40960, tie_word_embeddings=True),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, 151936, 40960),
    "qwen3-32b": _shape(5120, 25600, 64, 64, 8, 151936, 40960),
    "qwen3-30b-a3b": _shape(
        2048, 6144, 48, 32, 4, 151936, 40960, moe_intermediate_size=768, **_QWEN3_MOE
    ),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49152, 8192, head_dim=64, tie_word_embeddings=True),
}


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """A cost model computed from a card and a model's shape.

    Attributes:
        itemsize: bytes of a weight and of a KV number.
        streams: whether tokens are streamed over HTTP by the same process.
    """

    card: Card
    shape: ModelShape
    itemsize: int = 2
    streams: bool = True
    is_async: bool = True

    def device_s(self, shape: StepShape) -> float:
        """Seconds that the device works on a step."""
        card, model = self.card, self.shape
        weights = model.weights_read(shape.tokens) + model.head_weights
        read_s = weights * self.itemsize / (card.bandwidth * READ_WEIGHTS)
        active = model.layer_weights + model.experts_per_token * model.expert_weights
        flops = 2.0 * (shape.tokens * active + shape.logit_rows * model.head_weights)
        compute_s = flops / (card.flops * PRODUCTS)
        products_s = (read_s**KNEE + compute_s**KNEE) ** (1 / KNEE)
        seconds = products_s + model.num_layers * LAYER_S
        kv_speed = card.bandwidth * READ_KV
        seconds += shape.tokens * model.activations_per_token * self.itemsize / kv_speed
        num_pairs = shape.decode_context + shape.repeated_context
        if shape.decode_rows:
            part = model.context_share(num_pairs / shape.decode_rows)
            seconds += part * self._attention_s(shape.decode_context, num_pairs)
        chunk_tokens = shape.tokens - shape.decode_rows
        if chunk_tokens:
            part = model.context_share(shape.chunk_pairs / chunk_tokens)
            seconds += part * self._attention_s(shape.chunk_context, shape.chunk_pairs)
            seconds += model.num_layers * CHUNK_S
        if shape.repeated_context:
            seconds += model.num_layers * SHARED_S
        return seconds + (shape.decode_rows * STREAM_S if self.streams else 0.0)

    def _attention_s(self, context: float, num_pairs: float) -> float:
        read_s = context * self.shape.kv_per_token * self.itemsize
        compute_s = num_pairs * self.shape.pair_flops / (self.card.flops * ATTENTION)
        return max(read_s / (self.card.bandwidth * READ_KV), compute_s)

    def host_s(self, shape: StepShape) -> float:
        """Seconds of the GPU thread's own work."""
        seconds = HOST_S + HOST_ROW_S * shape.decode_rows
        if shape.tokens > GRAPH_TOKENS:
            seconds += self.shape.num_layers * LAUNCH_S
        return seconds

    def kv_tokens(self, mem_fraction: float) -> int:
        """Tokens of KV that fit beside the weights. Raises StartError where none do."""
        weights = self.shape.num_weights * self.itemsize
        free = self.card.memory * mem_fraction - weights - OTHER_BYTES
        tokens = int(free // (self.shape.kv_per_token * self.itemsize))
        if tokens < 256:
            raise StartError(
                f"{self.shape.name} with {weights / 1e9:.0f} GB of weights leaves no room for KV "
                f"in the {self.card.memory / 1e9:.0f} GB of one {self.card.name}"
            )
        return tokens


def find_card(name: str) -> Card:
    """A card of CARDS, in any case. Raises StartError."""
    if name.lower() not in CARDS:
        known = ", ".join(card.name for card in CARDS.values())
        raise StartError(f"no card {name!r}; there are {known}")
    return CARDS[name.lower()]
