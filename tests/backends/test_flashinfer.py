"""The calls that we make are calls that the installed FlashInfer takes; it is not run."""

import inspect

import numpy as np
import pytest
import torch
from cases import attention_cases, build_attention

from stoker.backends.api import AttentionSpec
from stoker.backends.cuda import flashinfer as ours
from stoker.backends.cuda import flashinfer_mla

package = pytest.importorskip("flashinfer", reason="flashinfer is not installed: calls unchecked")
jit = pytest.importorskip("flashinfer.jit")

DECODE = package.BatchDecodeWithPagedKVCacheWrapper
PREFILL = package.BatchPrefillWithPagedKVCacheWrapper
KIND = ours.Kind.of(AttentionSpec(32, 8, 128, 0.1, 100, 30.0), torch.bfloat16)


class Recorder:
    """Takes any call of these names."""

    def __init__(self):
        self.calls = {}

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.__setitem__(name, (args, kwargs))


def binds(method, call, own=("self",)):
    """Raises TypeError where a signature does not take a recorded call."""
    args, kwargs = call
    return inspect.signature(method).bind(*own, *args, **kwargs)


def planned(wrapper):
    """The method that holds plan's real signature; newer ones take **kwargs first."""
    return getattr(wrapper, "_plan_impl", wrapper.plan)


def plans():
    meta = build_attention(attention_cases()[0], torch.bfloat16).meta
    pages = ours.Pages.of(np.array([5, 64, 65], np.int32), 64)
    indices = torch.zeros(4, dtype=torch.int32)
    decode, prefill = Recorder(), Recorder()
    ours.plan_decode(decode, KIND, pages, indices, 64)
    ours.plan_prefill(prefill, KIND, torch.zeros(4, dtype=torch.int32), pages, indices, meta)
    return decode.calls["plan"], prefill.calls["plan"]


def test_plans():
    decode, prefill = plans()
    binds(planned(DECODE), decode)
    binds(planned(PREFILL), prefill)
    for args, kwargs in (decode, prefill):
        wrapper = DECODE if len(args) == 3 else PREFILL
        with pytest.raises(TypeError):  # so a call that is wrong would be seen
            binds(planned(wrapper), (args[1:], kwargs))
        with pytest.raises(TypeError):
            binds(planned(wrapper), (args, kwargs | {"scale": 1.0}))


def test_wrappers_and_runs(monkeypatch):
    made = []

    def record(name):
        return lambda *args, **kwargs: made.append((name, (args, kwargs)))

    monkeypatch.setattr(package, "BatchDecodeWithPagedKVCacheWrapper", record("decode"))
    monkeypatch.setattr(package, "BatchPrefillWithPagedKVCacheWrapper", record("prefill"))
    floats = torch.zeros(16, dtype=torch.uint8)
    buffers = {f"paged_kv_{n}_buffer": floats for n in ("indptr", "indices", "last_page_len")}
    for name in ("cuda cores", "tensor cores", "fa2", "fa3"):
        ours._wrapper(name, floats)
    ours._wrapper("tensor cores", floats, use_cuda_graph=True, **buffers)
    for name, call in made:
        binds((DECODE if name == "decode" else PREFILL).__init__, call)
    for wrapper in (DECODE, PREFILL):
        binds(wrapper.run, ((floats, (floats, floats)), {"out": floats}))
        source = inspect.getsource(wrapper)
        for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
            assert f"self.{name}," in source  # what `Space.give` sets is what plan reads


def test_modules(monkeypatch):
    recorder = Recorder()
    decode, prefill = jit.gen_batch_decode_module, jit.gen_batch_prefill_module
    monkeypatch.setattr(jit, "gen_batch_decode_module", recorder.decode)
    monkeypatch.setattr(jit, "gen_batch_prefill_module", recorder.prefill)
    ours.module(KIND, "cuda cores")
    ours.module(KIND, "fa3")
    binds(decode, recorder.calls["decode"], own=())
    bound = binds(prefill, recorder.calls["prefill"], own=())
    assert bound.arguments["backend"] == "fa3"
    for name in ("name", "is_compiled"):
        assert name in jit.JitSpec.__annotations__ or hasattr(jit.JitSpec, name)
    inspect.signature(jit.build_jit_specs).bind([])


def test_latent_attention(monkeypatch):
    version = tuple(map(int, package.__version__.split(".")[:2]))
    if version >= flashinfer_mla.TOO_NEW:
        pytest.skip("this version is not used")
    mla = pytest.importorskip("flashinfer.mla")
    wrapper, recorder = mla.BatchMLAPagedAttentionWrapper, Recorder()
    kind = flashinfer_mla.LatentKind(16, 0.1, torch.bfloat16)
    lens = np.array([5, 64, 65], np.int32)
    indices = torch.zeros(4, dtype=torch.int32)
    flashinfer_mla.plan(recorder, kind, ours.Pages.of(lens, 64), lens, indices, 64)
    args, kwargs = recorder.calls["plan"]
    bound = binds(planned(wrapper), (args, kwargs)).arguments
    assert bound["kv_len_arr"].tolist() == lens.tolist() and bound["kv_indices"] is indices
    with pytest.raises(TypeError):
        binds(planned(wrapper), (args, kwargs | {"scale": 1.0}))
    x = torch.zeros(1)
    binds(wrapper.run, ((x, x, x, x), {"out": x}))
    made = []
    monkeypatch.setattr(
        mla, "BatchMLAPagedAttentionWrapper", lambda *args, **kwargs: made.append((args, kwargs))
    )
    flashinfer_mla._wrapper("fa3", x)
    buffers = {name: x for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}
    flashinfer_mla._wrapper("fa2", x, use_cuda_graph=True, **buffers)
    for call in made:
        binds(wrapper.__init__, call)
    source = inspect.getsource(wrapper)
    for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
        assert f"self.{name}," in source  # what `Space.give` sets is what plan reads
    real = jit.gen_batch_mla_module
    monkeypatch.setattr(jit, "gen_batch_mla_module", recorder.module)
    flashinfer_mla.module(torch.bfloat16, "fa3")
    binds(real, recorder.calls["module"], own=())
