"""What `quantization_config` says: which linears are quantized, and how.

Runs on: gpu.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...api.errors import StartError
from ..hf_config import Fields
from .awq import Awq
from .compressed_tensors import PackedInts, PackedMxfp4, PlainCodes
from .fp8 import Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .online import Blocks, EightBits, FourBits

if TYPE_CHECKING:
    from .scheme import Scheme

Online = Literal["fp8", "int8", "int4"]
PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Rule:
    """Linears whose whole name the pattern matches are kept so; None is not quantized."""

    pattern: str
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """The quantization of a model's linears.

    Attributes:
        method: what the config calls it; "online" where the checkpoint is not quantized.
        rules: the first that matches a linear's name decides; without one it is not quantized.
        renamed: prefixes of names in the config, and what they are here (`Family.renamed`).
    """

    method: str
    rules: tuple[Rule, ...]
    renamed: tuple[tuple[str, str], ...] = ()

    def scheme(self, name: str) -> Scheme | None:
        """How the linear of this name lies in the checkpoint; None is as it is."""
        names = [name]
        names += [t + name.removeprefix(o) for t, o in self.renamed if name.startswith(o)]
        for rule in self.rules:
            if any(re.fullmatch(rule.pattern, n) for n in names):
                return rule.scheme
        return None


def online(scheme: Online, gguf_types: Set[str] = frozenset()) -> QuantConfig:
    """Of a checkpoint that is not quantized; the head, which decides the tokens, stays.

    Args:
        gguf_types: blocks to prefer for linears that are no experts, if int8 or int4 are there.
    """
    chosen: Scheme = FourBits() if scheme == "int4" else EightBits(scheme)
    rules = [Rule("lm_head", None), Rule(r".*\.experts(\..*)?", chosen), Rule(".*", chosen)]
    if scheme != "fp8" and {"Q8_0", "Q4_1"} <= gguf_types:
        rules[-1] = Rule(".*", Blocks(4 if scheme == "int4" else 8))
    return QuantConfig("online", tuple(rules))


def parse(fields: Fields, renamed: Mapping[str, str]) -> QuantConfig:
    """A config's `quantization_config`.

    Args:
        renamed: see `Family.renamed`.

    Raises:
        StartError: it asks for what no scheme does.
    """
    method = str(fields.get("quant_method"))
    if method not in METHODS:
        raise _unsupported("quant_method", fields.get("quant_method"), METHODS)
    return QuantConfig(method, METHODS[method](fields), tuple(renamed.items()))


def _unsupported(field: str, value: Any, supported: Iterable[object]) -> StartError:
    names = ", ".join(map(str, supported))
    return StartError(
        f"quantization_config: {field} {value!r:.80} is not supported; there are {names}"
    )


def _ignored(fields: Fields, *keys: str) -> tuple[Rule, ...]:
    """A rule for all names in some lists: a module's, what it holds, and in any layer those so
    called. Published lists have hundreds, and each of thousands of experts' linears is looked up.
    """
    patterns = [_pattern(name) for key in keys for name in _names(fields, key)]
    return (Rule(rf"(.*\.)?(?:{'|'.join(patterns)})(\..*)?", None),) if patterns else ()


def _pattern(name: str) -> str:
    """Names are taken literally, but for the stars of gpt-oss ("model.layers.*.self_attn")."""
    return ".*".join(map(re.escape, name.removesuffix(".").split("*")))


def _strings(key: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise StartError(f"quantization_config: {key} must be a list of names, not {value!r:.80}")
    return list(value)


def _fp8(fields: Fields) -> tuple[Rule, ...]:
    activations = fields.get("activation_scheme") or "dynamic"
    if activations not in ("dynamic", "static"):
        raise _unsupported("activation_scheme", activations, ("dynamic", "static"))
    if fields.get("expert_dtype") not in (None, "fp8"):
        raise _unsupported("expert_dtype", fields.get("expert_dtype"), ("fp8",))
    if fields.get("fmt") not in (None, "e4m3"):
        raise _unsupported("fmt", fields.get("fmt"), ("e4m3",))
    block = fields.get("weight_block_size")
    if block is not None:
        block = _block("weight_block_size", block)
        if activations == "static":
            raise _unsupported("activation_scheme", activations, ("dynamic (with blocks)",))
    ignored = _ignored(fields, "modules_to_not_convert", "ignored_layers", "ignore")
    head = Rule("lm_head", None)
    return (*ignored, head, Rule(".*", Fp8(block, is_static=activations == "static")))


def _block(field: str, block: Any) -> tuple[int, int]:
    if (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(b) is int and b > 0 for b in block)
    ):
        return block[0], block[1]
    raise StartError(
        f"quantization_config: {field} must be two positive integers, not {block!r:.80}"
    )


def _group_size(fields: Fields) -> int | None:
    """None where all inputs share a scale, which is written -1."""
    return None if fields.get("group_size") == -1 else fields.integer("group_size", 128)


def _awq(fields: Fields) -> tuple[Rule, ...]:
    if fields.integer("bits", 4) != 4:
        raise _unsupported("bits", fields.get("bits"), (4,))
    if str(fields.get("version") or "gemm").lower() != "gemm":
        raise _unsupported("version", fields.get("version"), ("gemm",))
    if not fields.flag("zero_point", True):
        raise _unsupported("zero_point", False, (True,))
    names = _names(fields, "modules_to_not_convert")
    # AutoAWQ leaves out what has such a name anywhere in its own.
    left_out = tuple(Rule(f".*{re.escape(name)}.*", None) for name in names)
    return (*left_out, Rule("lm_head", None), Rule(".*", Awq(_group_size(fields))))


def _gptq(fields: Fields) -> tuple[Rule, ...]:
    layout = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    shifts = {"gptq": 1, "gptq_v2": 0}
    if layout not in shifts:
        raise _unsupported("checkpoint_format", layout, shifts)
    if fields.get("pack_dtype") not in (None, "int32"):
        raise _unsupported("pack_dtype", fields.get("pack_dtype"), ("int32",))
    rules: list[Rule] = []
    # GPTQModel's: "-:regex" leaves linears out, "+:regex" or "regex" gives some other settings.
    for pattern, changes in fields.table("dynamic").items():
        if pattern.startswith("-:"):
            rules.append(Rule(f"{_regex('dynamic', pattern[2:])}.*", None))
        else:
            where = f"dynamic.{pattern}"
            scheme = _gptq_scheme(_object(where, changes), fields, shifts[layout])
            rules.append(Rule(f"{_regex('dynamic', pattern.removeprefix('+:'))}.*", scheme))
    if not fields.flag("lm_head"):
        rules.append(Rule("lm_head", None))
    only = fields.get("modules_in_block_to_quantize")
    pattern = ".*"
    if only is not None:
        names = [n for part in only for n in ([part] if isinstance(part, str) else part)]
        pattern = (
            rf".*\.({'|'.join(map(re.escape, _strings('modules_in_block_to_quantize', names)))})"
        )
    rules.append(Rule(pattern, _gptq_scheme(fields, fields, shifts[layout])))
    return tuple(rules)


def _gptq_scheme(given: Fields, general: Fields, zero_shift: int) -> Gptq:
    """Of settings, the general ones where they are silent."""

    def of(key: str) -> Fields:
        return general if given.get(key) is None else given

    bits = of("bits").integer("bits", 4)
    if bits not in (4, 8):
        raise _unsupported("bits", bits, (4, 8))
    has_order = of("desc_act").flag("desc_act", True)
    return Gptq(bits, _group_size(of("group_size")), zero_shift, has_order)


def _regex(field: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise StartError(f"quantization_config: {field}: {pattern!r:.80}: {error}") from None
    return f"(?:{pattern})"


def _mxfp4(fields: Fields) -> tuple[Rule, ...]:
    return (*_ignored(fields, "modules_to_not_convert"), Rule(r".*\.experts", Mxfp4()))


def _compressed_tensors(fields: Fields) -> tuple[Rule, ...]:
    if fields.get("quantization_status") not in (None, "compressed", "frozen"):
        raise _unsupported(
            "quantization_status", fields.get("quantization_status"), ("compressed",)
        )
    sparsity = fields.table("sparsity_config").get("format") or "dense"
    if sparsity != "dense":
        raise _unsupported("sparsity_config.format", sparsity, ("dense",))
    cache = fields.table("kv_cache_scheme")
    if cache and (cache.get("type"), cache.get("num_bits")) != ("float", 8):
        raise _unsupported("kv_cache_scheme.type", cache.get("type"), ("float of 8 bits",))
    if fields.get("transform_config"):
        raise StartError("quantization_config: transform_config is not supported")
    rules = [Rule(_name_or_regex("ignore", n), None) for n in _names(fields, "ignore")]
    groups = fields.table("config_groups")
    if not groups:
        raise StartError("quantization_config: config_groups is missing")
    for key, group in groups.items():
        given = _object(f"config_groups.{key}", group)
        layout = str(given.get("format") or fields.get("format"))
        scheme = _compressed_scheme(given, layout, f"config_groups.{key}")
        targets = _names(given, "targets") or ["Linear"]
        # Names and patterns go before the class of all linears, whatever the order of groups.
        for target in targets:
            if target != "Linear":
                rules.append(Rule(_name_or_regex("targets", target), scheme))
        if "Linear" in targets:
            rules.append(Rule(".*", scheme))
    rules.sort(key=lambda rule: rule.pattern == ".*")
    return tuple(rules)


def _names(fields: Fields, key: str) -> list[str]:
    return [] if fields.get(key) is None else _strings(key, fields.get(key))


def _name_or_regex(field: str, name: str) -> str:
    """A whole name, or "re:" and a pattern of its beginning."""
    if not name.startswith("re:"):
        return re.escape(name)
    return _regex(field, name.removeprefix("re:")) + ".*"


def _object(where: str, value: Any) -> Fields:
    if not isinstance(value, Mapping):
        raise StartError(f"quantization_config: {where} must be an object, not {value!r:.80}")
    return Fields(value)


def _compressed_scheme(group: Fields, layout: str, where: str) -> Scheme:
    if group.get("output_activations") is not None:
        raise _unsupported(f"{where}.output_activations", "quantized", ("null",))
    weights = _object(f"{where}.weights", group.get("weights"))
    bits, kind = weights.integer("num_bits", 8), str(weights.get("type") or "int")
    strategy, is_symmetric = str(weights.get("strategy")), weights.flag("symmetric", True)
    where_weights = f"{where}.weights"
    group_size = 0
    if strategy == "group":
        group_size = weights.integer("group_size")
    elif strategy not in ("tensor", "channel", "block"):
        raise _unsupported(
            f"{where_weights}.strategy", strategy, ("tensor", "channel", "group", "block")
        )
    if layout == "mxfp4-pack-quantized":
        if group.get("input_activations") is not None:
            raise _unsupported(f"{where}.input_activations", "of mxfp4", ("null",))
        return PackedMxfp4()
    if layout == "pack-quantized":
        if (kind, bits) not in (("int", 4), ("int", 8)):
            raise _unsupported(f"{where_weights}.num_bits", bits, ("int 4", "int 8"))
        if strategy not in ("channel", "group"):
            raise _unsupported(f"{where_weights}.strategy", strategy, ("channel", "group"))
        if group.get("input_activations") is not None:
            raise _unsupported(f"{where}.input_activations", "with packed weights", ("null",))
        has_order = weights.get("actorder") in ("group", "dynamic")
        return PackedInts(bits, group_size, is_symmetric, has_order)
    if layout not in PLAIN_FORMATS:
        raise _unsupported(
            f"{where}.format",
            layout,
            (*PLAIN_FORMATS, "pack-quantized", "mxfp4-pack-quantized"),
        )
    if (kind, bits) not in (("float", 8), ("int", 8)):
        raise _unsupported(f"{where_weights}.type", f"{kind} {bits}", ("float 8", "int 8"))
    block = {"tensor": (0, 0), "channel": (1, 0), "group": (1, group_size)}.get(strategy)
    if block is None:
        block = _block(f"{where_weights}.block_structure", weights.get("block_structure"))
    return PlainCodes(
        "fp8" if kind == "float" else "int8",
        block,
        is_symmetric,
        _activations(group, where, kind, strategy),
    )


def _activations(
    group: Fields, where: str, kind: str, strategy: str
) -> Literal["tensor", "token", "group"] | None:
    """How inputs are rounded; a scale that is measured for a whole tensor is one for each token,
    since tokens must not depend on what else is in the batch.
    """
    if group.get("input_activations") is None:
        return None
    where = f"{where}.input_activations"
    given = _object(where, group.get("input_activations"))
    if given.integer("num_bits", 8) != 8 or str(given.get("type") or "int") != kind:
        raise _unsupported(f"{where}.type", f"{given.get('type')} {given.get('num_bits')}", (kind,))
    if not given.flag("symmetric", True):
        raise _unsupported(f"{where}.symmetric", False, (True,))
    of = str(given.get("strategy"))
    if given.get("dynamic"):
        if of not in ("tensor", "token", "group"):
            raise _unsupported(f"{where}.strategy", of, ("tensor", "token", "group"))
        if of == "group" and strategy != "block":
            raise _unsupported(f"{where}.strategy", of, ("group (with blocks of weights)",))
        return "group" if of == "group" else "token"
    if of != "tensor":
        raise _unsupported(f"{where}.strategy", of, ("tensor (where it is not dynamic)",))
    return "tensor"


METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
