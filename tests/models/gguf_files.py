"""GGUF files of transformers models, as llama.cpp's converters write them."""

from pathlib import Path

import gguf
import numpy as np
import torch

PAIRED = ("llama", "granite", "granitemoe", "smollm3")  # q and k are stored for a rotation of pairs
KEYS = {  # metadata that is copied from the config's fields
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
}
WINDOWED = ("gemma2", "gemma3", "phi3", "olmo2", "cohere2", "gpt-oss")  # whose window is written


def write(path: Path, architecture: str, fields: dict, tensors: dict) -> Path:
    """A GGUF file by gguf's writer; a tensor is float32, or (raw bytes [rows, n], type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        key = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(hf: torch.nn.Module, architecture: str) -> tuple[dict, dict]:
    """Metadata and tensors; names by gguf's own table."""
    config = hf.config.to_dict()
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"]
    )
    tensors = {}
    for name, tensor in _tensors(hf, architecture).items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensors[ours or name] = tensor
    return _metadata(hf.config, architecture), tensors


def _metadata(hf_config, architecture: str) -> dict:
    config = hf_config.to_dict()
    fields = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(config["vocab_size"])],
    }
    fields |= {key: config[ours] for ours, key in KEYS.items() if config.get(ours) is not None}
    for ours, key in (
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_eps", "attention.layer_norm_epsilon"),
        ("norm_epsilon", "attention.layer_norm_epsilon"),
    ):
        if config.get(ours) is not None:
            fields[key] = float(config[ours])
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[key] for key in experts if config.get(key)), None)
    if count is not None:
        fields["expert_count"] = count
    if architecture == "glm4moe" or (architecture == "deepseek2" and config.get("norm_topk_prob")):
        fields["expert_weights_norm"] = config["norm_topk_prob"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim"):
        fields["attention.key_length"] = fields["attention.value_length"] = head_dim
    if architecture in WINDOWED:
        window = config.get("sliding_window")
        if window is not None or architecture == "phi3":
            fields["attention.sliding_window"] = window or 0
    if architecture == "deepseek2":
        head_dim = config["qk_rope_head_dim"]
        fields["attention.head_count_kv"] = 1
        fields["attention.key_length"] = config["kv_lora_rank"] + head_dim
        fields["attention.value_length"] = config["kv_lora_rank"]
        fields["attention.key_length_mla"] = config["qk_nope_head_dim"] + head_dim
        fields["expert_gating_func"] = 2 if config["model_type"] == "deepseek_v3" else 1
    rope = config["rope_parameters"]
    whole, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    fields["rope.freq_base"] = float(whole["rope_theta"])
    if "rope_theta" in local and architecture != "gemma3":
        fields["rope.freq_base_swa"] = float(local["rope_theta"])
    if whole["rope_type"] in ("linear", "yarn"):
        fields["rope.scaling.type"] = whole["rope_type"]
        fields["rope.scaling.factor"] = float(whole["factor"])
        if "original_max_position_embeddings" in whole:
            original = whole["original_max_position_embeddings"]
            fields["rope.scaling.original_context_length"] = original
    if whole.get("mscale_all_dim"):
        fields["rope.scaling.yarn_log_multiplier"] = 0.1 * whole["mscale_all_dim"]
    if whole["rope_type"] == "longrope":
        fields["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
        if whole.get("attention_factor"):
            fields["rope.scaling.attn_factor"] = float(whole["attention_factor"])
    if architecture not in ("gemma2", "gemma3"):
        fields["rope.dimension_count"] = int(head_dim * whole.get("partial_rotary_factor", 1.0))
    return fields


def _tensors(hf: torch.nn.Module, architecture: str) -> dict[str, np.ndarray]:
    """By Hugging Face's names, in llama.cpp's layouts."""
    config, tensors = hf.config, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    norms: dict[str, list[np.ndarray]] = {}
    for name, tensor in hf.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensor.numpy()
        part = name.split(".")[-2]
        if architecture in PAIRED and part in heads:
            halves = tensor.reshape(heads[part], 2, tensor.shape[0] // heads[part] // 2, -1)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and part.endswith("norm"):
            tensor = tensor + 1
        layer = "blk." + [*name.split("."), ""][2]
        if architecture == "gpt-oss" and ".experts." in name:
            tensors |= _gpt_oss_experts(layer, name, tensor)
            continue
        if name.endswith("input_linear.weight"):
            gate, up = np.split(tensor, 2)
            tensors |= {f"{layer}.ffn_gate_shexp.weight": gate, f"{layer}.ffn_up_shexp.weight": up}
            continue
        if name.endswith("output_linear.weight"):
            name = f"{layer}.ffn_down_shexp.weight"
        elif name.endswith("block_sparse_moe.router.weight"):
            name = f"{layer}.ffn_gate_inp.weight"
        elif name.endswith(".sinks"):
            name += ".weight"
        name = name.replace("block_sparse_moe", "mlp")
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(tensor, 2, axis=1)
            tensors[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            name, tensor = name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            name += ".weight"
        elif name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        elif ".norms." in name:  # StableLM 2: of each head
            norms.setdefault(name.split(".norms.")[0] + ".weight", []).append(tensor)
            continue
        elif name.endswith("kv_b_proj.weight"):
            halves = tensor.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            tensors[f"{layer}.attn_k_b.weight"] = halves[:, : config.qk_nope_head_dim].swapaxes(
                1, 2
            )
            tensors[f"{layer}.attn_v_b.weight"] = halves[:, config.qk_nope_head_dim :]
            continue
        elif name.endswith("e_score_correction_bias"):
            name = name.replace("_bias", ".bias")
        tensors[name] = tensor
    tensors |= {name: np.stack(parts) for name, parts in norms.items()}
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return tensors


def _gpt_oss_experts(layer: str, name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """[num_experts, in, out], gate and up in turns, and their biases."""
    kind = "bias" if name.endswith("_bias") else "weight"
    if kind == "weight":
        tensor = tensor.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"{layer}.ffn_down_exps.{kind}": tensor}
    return {
        f"{layer}.ffn_gate_exps.{kind}": tensor[:, 0::2],
        f"{layer}.ffn_up_exps.{kind}": tensor[:, 1::2],
    }
