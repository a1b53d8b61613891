"""FlashInfer's provider of latent attention, with a wrapper that computes in torch what it planned.

Run by `test_triton_interpreted.py`: the pages are gathered by a Triton kernel. Whether the real
package takes such calls is checked in `test_flashinfer.py`.
"""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cases import ORACLE, AttentionCase, build_attention, oracle_inputs

from stoker.backends import registry
from stoker.backends.api import MLASpec
from stoker.backends.cuda import flashinfer, flashinfer_mla
from stoker.backends.cuda.flashinfer_mla import FlashInferMLA, LatentKind

BF16 = torch.bfloat16
DECODE = AttentionCase("decode", [(1, 1), (1, 16), (1, 53), (1, 0)], 16, 4, 1, 576)
SPEC = MLASpec(4, 512, 64, 128, 128, 576**-0.5)
RUNTIME = SimpleNamespace(name="cuda", description="a card", device=torch.device("cpu"))


class Wrapper:
    """Plans are counted."""

    plans = 0

    def __init__(self, float_workspace_buffer, backend, use_cuda_graph=False, **buffers):
        assert backend in ("fa2", "fa3") and not float_workspace_buffer.any()
        assert set(buffers) == (
            {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"} if use_cuda_graph else set()
        )
        self.buffers = buffers

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, *, causal, **plan):
        Wrapper.plans += 1
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert not causal and all(x.dtype == torch.int32 for x in given)
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1)) and kv_len_arr.min() >= 1
        assert self._pin_memory_int_workspace_buffer is not self._int_workspace_buffer
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        for name, x in zip(names, given, strict=True):
            if name in self.buffers:
                self.buffers[name][: len(x)].copy_(x)
        self.held = self.buffers or dict(zip(names, given, strict=True))
        self.args = plan

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out):
        plan, held = self.args, self.held
        assert (plan["head_dim_ckv"], plan["head_dim_kpe"]) == (512, 64)
        assert plan["q_data_type"] == plan["kv_data_type"] == q_nope.dtype
        assert plan["num_heads"] == q_nope.shape[1]
        for row, kv_len in enumerate(held["kv_len_arr"].tolist()):
            pages = held["kv_indices"][held["kv_indptr"][row] : held["kv_indptr"][row + 1]].long()
            ckv, kpe = (x[pages].flatten(0, 1)[:kv_len].double() for x in (ckv_cache, kpe_cache))
            logits = q_nope[row].double() @ ckv.T + q_pe[row].double() @ kpe.T
            out[row] = ((logits * plan["sm_scale"]).softmax(-1) @ ckv).to(out.dtype)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package of that name, whose modules are built as `package.built` says."""
    package, jit, mla = (ModuleType(f"flashinfer{x}") for x in ("", ".jit", ".mla"))
    package.__spec__ = ModuleSpec("flashinfer", None)
    mla.BatchMLAPagedAttentionWrapper = Wrapper
    package.built, package.asked = {"fa2", "fa3"}, []
    jit.gen_batch_mla_module = lambda backend, *_, use_profiler: SimpleNamespace(
        name=backend, is_compiled=backend in package.built
    )
    jit.build_jit_specs = lambda specs: package.asked.extend(s.name for s in specs)
    for module in (package, jit, mla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flashinfer_mla, "FLOAT_BYTES", 1024)
    monkeypatch.setattr(flashinfer, "INT_BYTES", 1024)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    monkeypatch.setattr(flashinfer, "built_libraries", lambda modules: iter(()))
    monkeypatch.setattr(flashinfer.importlib.metadata, "version", lambda name: "0.6.15.post1")
    Wrapper.plans = 0
    return package


def served() -> FlashInferMLA:
    ops = FlashInferMLA()
    ops.uses[LatentKind.of(SPEC, BF16)] = "fa3"
    return ops


def attend(ops, inputs, meta=None):
    q_latent, q_rope = inputs.q.split([512, 64], 2)
    return ops.mla_attend(q_latent, q_rope, meta or inputs.meta, inputs.cache, SPEC)


def check(got, inputs):
    known, real = oracle_inputs(inputs), inputs.meta.kv_lens > 0
    q_latent, q_rope = known.q.split([512, 64], 2)
    want = ORACLE.mla_attend(q_latent, q_rope, known.meta, known.cache, SPEC)
    torch.testing.assert_close(got[real].double(), want[real], rtol=2e-2, atol=2e-2)


def test_decode_rows_are_its_and_layers_share_a_plan(package):
    inputs, ops = build_attention(DECODE, BF16), served()
    inputs.cache.k.nan_to_num_(0)  # padding rows read some page
    for _ in range(2):
        check(attend(ops, inputs), inputs)
    assert Wrapper.plans == 1
    attend(ops, build_attention(replace(DECODE, rows=[(1, 5), (3, 9)]), BF16))  # ours
    attend(ops, build_attention(DECODE, torch.float32))
    assert Wrapper.plans == 1


def test_a_captured_step_is_planned_before_each_replay(package):
    inputs, ops = build_attention(DECODE, BF16), served()
    inputs.cache.k.nan_to_num_(0)
    meta, lens = inputs.meta, inputs.meta.kv_lens.clone()
    captured = replace(meta, max_kv_len=10_000, kv_lens_cpu=meta.kv_lens_cpu * 0 + 1)
    meta.kv_lens.zero_()
    for _ in range(2):  # to warm up, and the capture
        captured.plans.clear()
        attend(ops, inputs, captured)
    assert Wrapper.plans == 1
    for num_live in (len(lens), len(lens) - 2):
        meta.kv_lens.copy_(lens)
        meta.kv_lens[num_live:] = 0  # rows that pad
        meta.kv_lens_cpu[num_live:] = 0
        ops.replan(captured, meta.kv_lens_cpu[:num_live])
        captured.plans.clear()
        check(attend(ops, inputs, captured), inputs)
    assert Wrapper.plans == 3


def settle(spec=SPEC, is_forced=False, dtype=BF16):
    ops = FlashInferMLA()
    return ops, ops.settle([spec], dtype, 64, RUNTIME, is_forced=is_forced)


def test_the_faster_kernel_is_chosen(package, monkeypatch):
    times = {"decode": {"triton": 100.0, "fa2": 99.0, "fa3": 80.0}}
    monkeypatch.setattr(FlashInferMLA, "_measure", lambda *_: times)
    ops, reason = settle()
    assert reason is None and list(ops.uses.values()) == ["fa3"]
    times["decode"]["fa3"] = 99.0
    assert list(settle()[0].uses.values()) == ["fa3"]  # the second start reads the file
    assert "no faster" in settle(replace(SPEC, num_heads=8))[1]
    assert "serves a rank of 512" in settle(replace(SPEC, rank=256))[1]
    assert "serves a rank of 512" in settle(dtype=torch.float32)[1]
    package.built = {"fa2"}
    assert list(settle(is_forced=True)[0].uses.values()) == ["fa2"]
    package.built = set()
    assert settle(is_forced=True)[1] == flashinfer.NOT_BUILT
    monkeypatch.setitem(sys.modules, "flashinfer.jit", None)
    assert settle()[1].startswith("it cannot be imported: ")


def test_where_it_cannot_run(package, monkeypatch):
    ops = FlashInferMLA()
    assert ops.probe(SimpleNamespace(name="rocm")) == "not a CUDA device"
    monkeypatch.setattr(flashinfer_mla, "built_libraries", lambda modules: iter(()))
    assert "stoker warm" in ops.probe(RUNTIME)
    monkeypatch.setattr(flashinfer_mla, "built_libraries", lambda modules: iter(["x"]))
    assert ops.probe(RUNTIME) is None
    monkeypatch.setattr(flashinfer_mla.importlib.metadata, "version", lambda name: "0.7.4")
    assert ops.probe(RUNTIME) == "version 0.7.4 makes its plans in buffers of its own"
    monkeypatch.setattr(flashinfer_mla.importlib.util, "find_spec", lambda name: None)
    assert ops.probe(RUNTIME) == "flashinfer is not installed"


def test_warm_builds_what_is_missing(package):
    assert FlashInferMLA().build([SPEC], BF16) == package.asked == []
    package.built = set()
    assert FlashInferMLA().build([replace(SPEC, rank=256)], BF16) == []
    assert FlashInferMLA().build([SPEC], BF16) == package.asked == ["fa3"]


def test_the_registry_settles_latent_layers_alone(package):
    """A model without other attention asks nobody for that."""
    package.built = set()
    ours = SimpleNamespace(name="triton", mla_attend="ours", mla_attend_dense="dense")
    bound = SimpleNamespace(mla_attend=None, mla_attend_dense=None, attend="as it was", replan=None)
    choices = {op: registry.Choice(op, "", {}) for op in ("attend", *registry.LATENT_OPS)}
    candidates = {registry.LATENT_OPS: registry.Candidates((FlashInferMLA(), ours), False)}
    backend = registry.Backend(RUNTIME, bound, choices, (), candidates)
    backend.settle([SPEC], BF16, 64)
    assert (bound.mla_attend, bound.mla_attend_dense, bound.attend) == (
        "ours",
        "dense",
        "as it was",
    )
    assert choices["mla_attend"].provider == "triton"
    assert choices["mla_attend"].passed_over == {"flashinfer_mla": flashinfer.NOT_BUILT}
    package.built = {"fa2"}
    asked = FlashInferMLA()
    candidates = {registry.LATENT_OPS: registry.Candidates((asked,), True)}
    replace(backend, candidates=candidates).settle([SPEC], BF16, 64)
    assert bound.mla_attend == asked.mla_attend
    assert bound.replan == asked.replan
