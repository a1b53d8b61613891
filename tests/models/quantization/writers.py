"""Writers of quantized checkpoints, and the weights that they stand for.

Written from the formats' descriptions, and compared once with what AutoAWQ 0.2.9 (`WQLinear_GEMM`),
GPTQModel 7.7.0 (`TorchLinear.pack_block`, checkpoint formats 1 and 2) and transformers 5.24
(`convert_moe_packed_tensors`) make of the same numbers. What compressed-tensors keeps is written by
that package itself, see `test_compressed_tensors.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.backends.quantized import E2M1

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]  # a weight to its tensors and its rounded value


def quantize_folder(folder: Path, config: dict, write: Callable[[str], Writer | None]) -> Tensors:
    """Rewrite a saved model of floats.

    Args:
        config: what becomes `quantization_config`.
        write: the writer of a linear of this name, None for what stays as it is.

    Returns:
        The whole state, with the weights as they are now.
    """
    saved = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    state, rounded = {}, dict(saved)
    for full_name, tensor in saved.items():
        name, _, last = full_name.rpartition(".")
        writer = write(name) if last == "weight" and tensor.dim() == 2 else None
        if writer is None:
            state[full_name] = tensor
            continue
        tensors, rounded[full_name] = writer(tensor.float())
        state |= {f"{name}.{suffix}": t.contiguous() for suffix, t in tensors.items()}
    save_file(state, folder / "model.safetensors")
    change_config(folder, quantization_config=config)
    return rounded


def change_config(folder: Path, **fields) -> None:
    """Set fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def words(codes: Tensor, bits: int) -> Tensor:
    """[n, m] codes to int32 [n / k, m], k of the first dimension in each word, the lowest first."""
    per_word = 32 // bits
    packed = torch.zeros(codes.shape[0] // per_word, codes.shape[1], dtype=torch.int64)
    for i in range(per_word):
        packed |= codes[i::per_word].long() << (bits * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def group_parameters(
    weight: Tensor, group_of: Tensor, bits: int, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zeros [groups, out], by the range of each group."""
    num_groups, top = int(group_of.max()) + 1, 2**bits - 1
    scales = torch.empty(num_groups, len(weight))
    zeros = torch.empty(num_groups, len(weight))
    for group in range(num_groups):
        part = weight[:, group_of == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            scales[group] = 2 * torch.maximum(-low, high) / top
            zeros[group] = (top + 1) // 2
        else:
            scales[group] = (high - low) / top
            zeros[group] = (-low / scales[group]).round()
    scales = scales.half().float()
    codes = (weight / scales[group_of].T + zeros[group_of].T).round().clamp(0, top)
    return codes.int(), scales, zeros.int()


def gptq(
    bits: int, group_size: int, is_symmetric: bool, act_order: bool, version: int = 1
) -> Writer:
    """qweight in words along the inputs, qzeros along the outputs, and g_idx."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_in = weight.shape[1]
        size = num_in if group_size == -1 else group_size
        group_of = torch.arange(num_in) // size
        if act_order:
            gen = torch.Generator().manual_seed(num_in)  # the same of q, k and v
            group_of = group_of[torch.randperm(num_in, generator=gen)]
        codes, scales, zeros = group_parameters(weight, group_of, bits, is_symmetric)
        saved_zeros = (zeros - (1 if version == 1 else 0)) & 2**bits - 1
        tensors = {
            "qweight": words(codes.T, bits),
            "qzeros": words(saved_zeros.T, bits).T,
            "scales": scales.half(),
            "g_idx": group_of.int(),
        }
        return tensors, (codes - zeros[group_of].T) * scales[group_of].T

    return write


def awq(group_size: int) -> Writer:
    """Words along the outputs, in the order of the gemm kernel."""
    held = [0, 2, 4, 6, 1, 3, 5, 7]

    def in_words(codes: Tensor) -> Tensor:
        """[n, out] to int32 [n, out / 8]."""
        return words(codes.unflatten(1, (-1, 8))[..., held].flatten(1).T, 4).T

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_in = weight.shape[1]
        group_of = torch.arange(num_in) // (num_in if group_size == -1 else group_size)
        codes, scales, zeros = group_parameters(weight, group_of, 4, is_symmetric=False)
        tensors = {
            "qweight": in_words(codes.T),
            "qzeros": in_words(zeros),
            "scales": scales.half(),
        }
        return tensors, (codes - zeros[group_of].T) * scales[group_of].T

    return write


def ordered_groups(group_size: int) -> Writer:
    """compressed-tensors' pack-quantized with weight_g_idx, which it no longer writes."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_in = weight.shape[1]
        gen = torch.Generator().manual_seed(num_in)
        group_of = (torch.arange(num_in) // group_size)[torch.randperm(num_in, generator=gen)]
        codes, scales, zeros = group_parameters(weight, group_of, 4, is_symmetric=True)
        tensors = {
            "weight_packed": words(codes.T, 4).T,
            "weight_scale": scales.T,
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": group_of.int(),
        }
        return tensors, (codes - zeros[group_of].T) * scales[group_of].T

    return write


def fp8(
    block: tuple[int, int] | None = None,
    per_channel: bool = False,
    input_scale: float | None = None,
    names: tuple[str, str] = ("weight_scale", "input_scale"),
    shape: tuple[int, ...] = (),
) -> Writer:
    """Float8 codes, with a scale of each block, of each row, or of all.

    Args:
        names: of the scales of weight and input.
        shape: of a scale of all.
    """

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_out, num_in = weight.shape
        rows, columns = block or ((1, num_in) if per_channel else (num_out, num_in))
        scales = torch.empty(-(-num_out // rows), -(-num_in // columns))
        codes = torch.empty_like(weight)
        rounded = torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn).float()
                rounded[at] = codes[at] * scales[i, j]
        tensors = {"weight": codes.to(torch.float8_e4m3fn), names[0]: scales}
        if block is None and not per_channel:
            tensors[names[0]] = scales.reshape(shape)
        if input_scale is not None:
            tensors[names[1]] = torch.full(shape, input_scale)
        return tensors, rounded

    return write


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., in] to blocks [..., in / 32, 16], exponents [..., in / 32], and the rounded weight."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)  # 6 is the largest code
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    rounded = torch.tensor(E2M1)[codes] * exponents.exp2()[..., None]
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), rounded.flatten(-2)
