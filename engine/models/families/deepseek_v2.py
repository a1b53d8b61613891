"""DeepSeek V2, V2-Lite and V2.5: latent attention, experts beside shared ones.

Runs on: any (pure).
"""

from dataclasses import replace

from ....backends.api import RouterSpec
from ...api.errors import StartError
from ..config import LatentConfig, ModelConfig, MoEConfig, SharedExpert
from ..hf_config import Family, Fields, rope, yarn_mscale


def refine(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Experts are chosen by a softmax, of all groups or of the best by their best expert."""
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise StartError(f"model config: topk_method {method!r:.80} is not supported")
    if hf.get("scoring_func") not in (None, "softmax") or hf.flag("norm_topk_prob"):
        raise StartError("model config: DeepSeek V2 scores by a softmax that stays as it is")
    has_groups = method == "group_limited_greedy"
    router = RouterSpec(
        hf.integer("num_experts_per_tok"),
        num_groups=hf.integer("n_group") if has_groups else 1,
        top_groups=hf.integer("topk_group") if has_groups else 1,
        renormalize=False,
        scale=hf.number("routed_scaling_factor", 1.0),
    )
    config = replace(config, mlp_bias=hf.flag("mlp_bias"))
    return latent_attention(replace(config, moe=experts(config, hf, router)), hf)


def latent_attention(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Neighbouring pairs rotate, unless rope_interleave is false."""
    latent = LatentConfig(
        q_rank=None if hf.get("q_lora_rank") is None else hf.integer("q_lora_rank"),
        kv_rank=hf.integer("kv_lora_rank", 512),
        nope_dim=hf.integer("qk_nope_head_dim", 128),
        rope_dim=hf.integer("qk_rope_head_dim", 64),
        value_dim=hf.integer("v_head_dim", 128),
    )
    rotary = rope(hf, latent.rope_dim)
    head_dim = latent.nope_dim + latent.rope_dim
    scale, scaling = head_dim**-0.5, Fields(hf.table("rope_parameters") or hf.table("rope_scaling"))
    if rotary.kind != "default" and scaling.get("mscale_all_dim"):
        scale *= yarn_mscale(rotary.factor, scaling.number("mscale_all_dim")) ** 2
    bias = hf.flag("attention_bias")
    return replace(
        config,
        num_kv_heads=config.num_heads,
        head_dim=head_dim,
        attention_scale=scale,
        rope=replace(rotary, interleaved=hf.flag("rope_interleave", True)),
        qkv_bias=bias,
        o_bias=bias,
        latent=latent,
    )


def experts(config: ModelConfig, hf: Fields, router: RouterSpec) -> MoEConfig:
    """Experts beside shared ones, behind first_k_dense_replace layers with an MLP."""
    size, first = hf.integer("moe_intermediate_size", 1407), hf.count("first_k_dense_replace")
    step, num_shared = hf.integer("moe_layer_freq", 1), hf.count("n_shared_experts")
    return MoEConfig(
        num_experts=hf.integer("n_routed_experts"),
        intermediate_size=size,
        router=router,
        layers=tuple(layer >= first and layer % step == 0 for layer in range(config.num_layers)),
        shared=SharedExpert("mlp.shared_experts", num_shared * size) if num_shared else None,
    )


FAMILY = Family(
    "deepseek_v2",
    ("DeepseekV2ForCausalLM",),
    "deepseek2",
    refine,
    "latent attention, experts beside shared ones, chosen in groups",
    {"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2},
)
