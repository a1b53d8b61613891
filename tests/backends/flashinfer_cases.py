"""FlashInfer's provider, with wrappers that compute in torch what they were planned for.

Run by `test_triton_interpreted.py`: the pages are gathered by a Triton kernel. Whether the real
package takes such calls is checked in `test_flashinfer.py`.
"""

import json
import math
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cases import ORACLE, attention_cases, build_attention, oracle_inputs, tree_cases

from stoker.backends import registry
from stoker.backends.api import AttentionSpec, BackendError, SharedPrefixes
from stoker.backends.cuda import flashinfer
from stoker.backends.cuda.flashinfer import FlashInferOps, Kind, Use

BF16 = torch.bfloat16


class Wrapper:
    """Both kinds; plans and runs are counted."""

    plans = runs = 0

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout,
        use_cuda_graph=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    ):
        assert kv_layout == "NHD" and not float_workspace_buffer.any()
        self.is_fixed = use_cuda_graph
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last = paged_kv_last_page_len_buffer

    def take(self, indptr, indices, last, qo_indptr, causal, plan):
        Wrapper.plans += 1
        assert indptr.dtype == last.dtype == indices.dtype == qo_indptr.dtype == torch.int32
        assert last.min() >= 1 and last.max() <= plan["page_size"]
        assert self._pin_memory_int_workspace_buffer is not self._int_workspace_buffer
        if self.is_fixed:
            assert len(last) == len(self.last)
            self.indptr.copy_(indptr)
            self.last.copy_(last)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last = indptr.clone(), indices, last.clone()
        self.qo_indptr, self.causal, self.args = qo_indptr, causal, plan

    def run(self, q, paged_kv_cache, *, out):
        Wrapper.runs += 1
        assert q.is_contiguous()
        plan = self.args
        window, softcap = plan["window_left"], plan["logits_soft_cap"]
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        assert plan["q_data_type"] == plan["kv_data_type"] == q.dtype
        for row in range(len(self.last)):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            kv_len = (len(pages) - 1) * plan["page_size"] + int(self.last[row])
            k, v = (x[pages].flatten(0, 1)[:kv_len].double() for x in paged_kv_cache)
            tokens = slice(int(self.qo_indptr[row]), int(self.qo_indptr[row + 1]))
            rows = q[tokens].double()
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            logits = torch.einsum("qhd,khd->hqk", rows, k) * plan["sm_scale"]
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            at = torch.arange(kv_len)
            own = at[kv_len - len(rows) :, None]
            visible = at <= own
            if window >= 0:
                visible &= at >= own - window
            p = logits.masked_fill(~visible, -math.inf).softmax(-1)
            out[tokens] = torch.einsum("hqk,khd->qhd", p, v).to(out.dtype)


class Decode(Wrapper):
    def __init__(self, floats, layout, use_tensor_cores=False, **arguments):
        super().__init__(floats, layout, **arguments)

    def plan(self, indptr, indices, last_page_len, **plan):
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self.take(indptr, indices, last_page_len, one_each, False, plan)


class Prefill(Wrapper):
    def __init__(self, floats, layout, backend, **arguments):
        assert backend in ("fa2", "fa3")
        super().__init__(floats, layout, **arguments)

    def plan(self, qo_indptr, indptr, indices, last_page_len, causal, **plan):
        assert causal
        self.take(indptr, indices, last_page_len, qo_indptr, causal, plan)


@pytest.fixture
def package(monkeypatch):
    """A package of that name, whose modules are built as `package.built` says."""
    package, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    package.__spec__ = ModuleSpec("flashinfer", None)
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    package.BatchPrefillWithPagedKVCacheWrapper = Prefill
    package.built, package.asked = {"decode", "fa2", "fa3"}, []

    def spec(name):
        return SimpleNamespace(name=name, is_compiled=name in package.built)

    jit.gen_batch_decode_module = lambda **_: spec("decode")
    jit.gen_batch_prefill_module = lambda backend, **_: spec(backend)
    jit.build_jit_specs = lambda specs: package.asked.extend(s.name for s in specs)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flashinfer, "FLOAT_BYTES", 1024)
    monkeypatch.setattr(flashinfer, "INT_BYTES", 1024)
    Wrapper.plans = Wrapper.runs = 0
    return package


def served(spec: AttentionSpec) -> FlashInferOps:
    ops = FlashInferOps()
    if (kind := Kind.of(spec, BF16)) is not None:
        ops.uses[kind] = Use("tensor cores", "fa3")
    return ops


def check(got, inputs):
    up = oracle_inputs(inputs)
    want = ORACLE.attend(up.q, up.meta, up.cache, up.spec)
    live = (inputs.meta.kv_lens > 0).repeat_interleave(inputs.meta.qo_indptr.diff())
    torch.testing.assert_close(got[live].double(), want[live], rtol=2e-2, atol=2e-2)


CASES = [c for c in (*attention_cases(), *tree_cases()) if "long" not in c.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attend(case, package):
    inputs = build_attention(case, BF16)
    ops, spec, meta = served(inputs.spec), inputs.spec, inputs.meta
    got = ops.attend(inputs.q, meta, inputs.cache, spec)
    check(got, inputs)
    is_served = spec.sinks is None and spec.head_dim in (64, 128, 256) and not case.tree
    kinds = (meta.num_decode_rows > 0) + (meta.num_decode_rows < meta.num_rows)
    assert Wrapper.plans == Wrapper.runs == (kinds if is_served else 0)
    check(ops.attend(inputs.q, meta, inputs.cache, spec), inputs)
    assert Wrapper.plans == (kinds if is_served else 0)  # another layer has the same plan


def test_a_captured_step_is_planned_before_each_replay(package):
    case = next(c for c in CASES if len(c.rows) > 3 and all(q == 1 for q, _ in c.rows))
    inputs = build_attention(replace(case, has_sinks=False, head_dim=64), BF16)
    meta, lens = inputs.meta, inputs.meta.kv_lens.clone()
    ops = served(inputs.spec)
    captured = replace(meta, max_kv_len=10_000, kv_lens_cpu=meta.kv_lens_cpu * 0 + 1)
    meta.kv_lens.zero_()
    for _ in range(2):  # to warm up, and the capture
        captured.plans.clear()
        ops.attend(inputs.q, captured, inputs.cache, inputs.spec)
    assert (Wrapper.plans, Wrapper.runs) == (1, 2)
    pinned = set()
    for num_live in (len(lens), len(lens) - 2):
        meta.kv_lens.copy_(lens)
        meta.kv_lens[num_live:] = 0  # rows that pad
        meta.kv_lens_cpu[num_live:] = 0
        ops.replan(captured, meta.kv_lens_cpu[:num_live])
        captured.plans.clear()
        inputs.q.copy_(inputs.q.roll(1, 0))
        check(ops.attend(inputs.q, captured, inputs.cache, inputs.spec), inputs)
        (wrapper,) = (c.wrapper for c in ops._captured.values())
        pinned.add(id(wrapper._pin_memory_int_workspace_buffer))
    assert Wrapper.plans == 3
    assert len(pinned) == 2  # a plan is not written over while the last one may be copied
    shared = SharedPrefixes(*(torch.zeros(1, n, dtype=torch.int32) for n in (16, 1, 1)))
    ops.replan(replace(captured, shared=shared), lens.numpy())
    assert Wrapper.plans == 3  # our kernels read shared prefixes


RUNTIME = SimpleNamespace(name="cuda", description="a card", device=torch.device("cpu"))
LLAMA = AttentionSpec(32, 8, 128, 0.1)
SINKS = AttentionSpec(32, 8, 128, 0.1, sinks=torch.zeros(32))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Measurements come from this list, one after the other."""
    given = []
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr(flashinfer, "built_libraries", lambda modules: iter(()))
    monkeypatch.setattr(flashinfer.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(FlashInferOps, "_measure", lambda self, *_: given.pop(0))
    return given


def settle(*specs, is_forced=False):
    ops = FlashInferOps()
    return ops, ops.settle(specs, BF16, 64, RUNTIME, is_forced=is_forced)


def test_the_faster_kernels_are_chosen_once_a_shape(package, measured, tmp_path):
    measured.append(
        {
            "decode": {"triton": 100.0, "cuda cores": 150.0, "tensor cores": 90.0},
            "prefill": {"triton": 100.0, "fa2": 200.0, "fa3": 99.0},  # not faster enough
        }
    )
    for _ in range(2):  # the second start reads the file
        ops, reason = settle(LLAMA, SINKS)
        assert reason is None
        assert list(ops.uses.values()) == [Use("tensor cores", None)]
    assert len(json.loads((tmp_path / "flashinfer.json").read_text())) == 1
    measured.append({"decode": {"triton": 9.0, "cuda cores": 9.0}, "prefill": {}})
    assert "no faster" in settle(replace(LLAMA, num_heads=8))[1]
    measured.append({"decode": {}, "prefill": {}})
    assert "not built" in settle(replace(LLAMA, head_dim=64))[1]
    assert "does not serve" in settle(SINKS)[1]


def test_forced_it_uses_what_is_built_without_a_measurement(package, measured):
    assert list(settle(LLAMA, is_forced=True)[0].uses.values()) == [Use("tensor cores", "fa3")]
    package.built = {"decode", "fa2"}
    alone = replace(LLAMA, num_kv_heads=32)
    assert list(settle(alone, is_forced=True)[0].uses.values()) == [Use("cuda cores", "fa2")]
    package.built = set()
    assert settle(LLAMA, is_forced=True)[1] == flashinfer.NOT_BUILT


def test_a_broken_installation_is_a_reason(package, measured, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.jit", None)
    assert settle(LLAMA, is_forced=True)[1].startswith("it cannot be imported: ")


def test_warm_builds_what_is_missing(package):
    package.built = {"fa2"}
    ops = FlashInferOps()
    names = ops.build([LLAMA, replace(LLAMA, num_heads=16), SINKS], BF16)
    assert sorted(names) == sorted(package.asked) == ["decode", "fa3"]


def test_where_it_cannot_run(monkeypatch):
    ops = FlashInferOps()
    assert ops.probe(SimpleNamespace(name="rocm")) == "not a CUDA device"
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)
    assert ops.probe(RUNTIME) == "flashinfer is not installed"
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer, "built_libraries", lambda modules: iter(()))
    assert "stoker warm" in ops.probe(RUNTIME)
    monkeypatch.setattr(flashinfer, "built_libraries", lambda modules: iter(["x"]))
    assert ops.probe(RUNTIME) is None


def test_built_modules_are_found_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(flashinfer.importlib.metadata, "version", lambda name: "1.0")
    assert not list(flashinfer.built_libraries(flashinfer.MODULES))
    for version in ("0.9", "1.0"):
        folder = tmp_path / ".cache/flashinfer" / version / "90a/cached_ops/batch_decode_x"
        folder.mkdir(parents=True)
        (folder / "batch_decode_x.so").touch()
    assert [path.parts[-5] for path in flashinfer.built_libraries(flashinfer.MODULES)] == ["1.0"]


def test_the_registry_passes_over_what_does_not_serve_the_model(package, measured, monkeypatch):
    ops, ours = FlashInferOps(), SimpleNamespace(name="triton", attend=lambda *_: "ours")
    measured.append({"decode": {"triton": 9.0, "fa3": 9.0}, "prefill": {}})

    def backend(is_forced):
        choice = registry.Choice("attend", "flashinfer", {})
        bound = SimpleNamespace(attend=ops.attend, replan=None)
        providers = (ops,) if is_forced else (ops, ours)
        candidates = {registry.ATTEND_OPS: registry.Candidates(providers, is_forced)}
        return registry.Backend(RUNTIME, bound, {"attend": choice}, (), candidates)

    chosen = backend(False)
    chosen.settle([LLAMA], BF16, 64)
    assert chosen.choices["attend"].provider == "triton"
    assert "no faster" in chosen.choices["attend"].passed_over["flashinfer"]
    assert chosen.ops.attend() == "ours" and chosen.ops.replan is None
    forced = backend(True)
    forced.settle([LLAMA], BF16, 64)
    assert forced.ops.attend == ops.attend and forced.ops.replan == ops.replan
    package.built = set()
    with pytest.raises(
        BackendError, match=r"cannot come from flashinfer: its modules .*stoker warm"
    ):
        backend(True).settle([LLAMA], BF16, 64)
