"""The CPU's runtime, the build of its kernels, and what they promise beyond the contract."""

import ctypes
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import AttentionCase, build_attention, make_rope, moved, random_experts

from stoker.backends import cpu
from stoker.backends.api import BackendError, LayerCache, LayerWeights
from stoker.backends.cpu import build, native_ops, probe
from stoker.backends.cpu.memory import HUGE_PAGE, Arena
from stoker.backends.cpu.native_ops import NativeOps
from stoker.backends.reference import ReferenceOps

RUNTIME = cpu.runtime()
NATIVE = NativeOps()
REASON = NATIVE.probe(RUNTIME)
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_memory_is_free_of_total():
    free, total = RUNTIME.memory()
    assert 0 < free <= total
    assert total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "features, dtype",
    [
        ({"avx512f", "avx512_bf16"}, torch.bfloat16),
        ({"amx_bf16"}, torch.bfloat16),
        ({"avx512f"}, torch.float32),
    ],
)
def test_bfloat16_is_the_default_where_it_is_multiplied(features, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "_cpu_features", lambda: frozenset(features))
    runtime = cpu.runtime()
    assert runtime.default_dtype(torch.bfloat16) == dtype


def test_an_op_that_torch_lacks_is_told_of(caplog):
    def product():
        return torch.ops.mkldnn.no_such_op(1)

    with caplog.at_level("INFO", "stoker.backends.cpu.probe"):
        assert probe.attempt("product of nothing", product) is None
    assert "no product of nothing: " in caplog.text and "no_such_op" in caplog.text
    assert probe.attempt("sum", lambda: torch.ones(3).sum()) == 3


def test_threads_are_torchs():
    before = torch.get_num_threads()
    try:
        RUNTIME.set_threads(1)
        assert torch.get_num_threads() == 1
        RUNTIME.set_threads(None)
        assert torch.get_num_threads() == RUNTIME.num_cores
    finally:
        torch.set_num_threads(before)


def test_arena_pieces_do_not_overlap_and_are_aligned():
    arena = Arena()
    pieces = [arena.empty((i, 7), torch.bfloat16).fill_(i) for i in range(1, 200)]
    assert all(p.data_ptr() % 64 == 0 for p in pieces)
    assert all((p == i).all() for i, p in enumerate(pieces, 1))
    big = arena.empty((100 << 20,), torch.uint8)
    assert big.data_ptr() % HUGE_PAGE == 0 and big.numel() == 100 << 20


# ---- The build


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """A source that compiles at once, and an empty cache."""
    source = tmp_path / "small.cpp"
    source.write_text(
        'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
    )
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return source


@needs_native
def test_kernels_are_built_once_and_rebuilt_for_another_processor(small_source, tmp_path):
    assert build.load("a cpu").answer() == 42
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 1
    written = files[0].stat().st_mtime_ns
    build.load("a cpu")
    assert files[0].stat().st_mtime_ns == written
    build.load("another cpu")
    assert len(list((tmp_path / "cache").iterdir())) == 2


@needs_native
def test_starts_at_the_same_time_do_not_collide(small_source, tmp_path):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(build.load("a cpu").answer()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_without_a_compiler_the_reason_says_so(small_source, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"no C\+\+ compiler"):
        build.load("a cpu")


@needs_native
def test_a_source_that_does_not_compile_gives_the_compilers_error(small_source, tmp_path):
    small_source.write_text("int answer( {")
    with pytest.raises(BackendError, match="error: ") as error:
        build.load("a cpu")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_old_processor_is_told_apart():
    runtime = cpu.runtime()
    runtime.features = frozenset({"avx2"})
    assert "lacks avx512" in NativeOps().probe(runtime)


@needs_native
def test_one_openmp_library_is_loaded():
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(loaded) <= 1


# ---- Results that do not depend on the company


@needs_native
@pytest.mark.parametrize("is_first", [False, True], ids=["", "first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("is_gemma", [False, True], ids=["llama", "gemma"])
def test_a_fused_layer_gives_the_bits_of_its_ops(dtype, is_gemma, is_first):
    case = AttentionCase("", [(1, 40), (1, 0), (30, 50)], 16, 4, 2, 32, 20 if is_gemma else None)
    results = []
    for layer in (NATIVE.decoder_layer, lambda *args: ReferenceOps.decoder_layer(NATIVE, *args)):
        torch.manual_seed(0)
        inputs = native_case(case, dtype)

        def linear(num_out, num_in, dtype=dtype):
            return NATIVE.pack_linear((torch.randn(num_out, num_in) / num_in**0.5).to(dtype), None)

        def norm(size):
            return torch.randn(size).to(torch.float32 if is_gemma else dtype)

        weights = LayerWeights(
            spec=inputs.spec,
            rope=make_rope(32),
            eps=1e-6,
            activation="gelu_tanh" if is_gemma else "silu",
            input_norm=norm(96),
            qkv=linear(8 * 32, 96),
            q_norm=norm(32) if is_gemma else None,
            k_norm=norm(32) if is_gemma else None,
            out=linear(96, 128),
            attention_out_norm=norm(96) if is_gemma else None,
            mlp_norm=norm(96),
            gate_up=linear(2 * 160, 96),
            down=linear(96, 160),
            mlp_out_norm=norm(96) if is_gemma else None,
        )
        residual = torch.randn(32, 96)
        x = None if is_first else torch.randn(32, 96).to(dtype)
        out = layer(x, residual, weights, inputs.meta, inputs.cache)
        real = inputs.real_tokens
        assert out.dtype is dtype
        results.append((out[real], residual[real], *inputs.cache))
    for fused, plain in zip(*results, strict=True):
        assert torch.equal(fused.nan_to_num(9.0), plain.nan_to_num(9.0))
    assert results[0][0].isfinite().all()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_gives_a_row_the_same_bits_in_any_batch(dtype):
    x = torch.randn(70, 576).to(dtype)
    packed = NATIVE.pack_linear(torch.randn(200, 576).to(dtype), torch.randn(200).to(dtype))
    together = NATIVE.linear(x, packed)
    for begin, end in ((0, 1), (1, 3), (3, 10), (10, 22), (22, 70)):
        assert torch.equal(NATIVE.linear(x[begin:end], packed), together[begin:end])


def native_case(case, dtype):
    """A case with its cache in the kernels' order."""
    inputs = build_attention(case, dtype)
    inputs.cache = NATIVE.from_nhd(inputs.cache)
    return inputs


def as_rows(inputs, row, q_lens):
    """One row's new tokens cut into rows of their own, as later steps would compute them."""
    meta = inputs.meta
    begin, end = (int(meta.qo_indptr_cpu[i]) for i in (row, row + 1))
    assert sum(q_lens) == end - begin
    start = int(meta.kv_lens_cpu[row]) - (end - begin)
    kv_lens = (start + np.cumsum(q_lens)).astype(np.int32)
    indptr = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    return inputs.q[begin:end], replace(
        meta,
        num_rows=len(q_lens),
        num_tokens=end - begin,
        qo_indptr_cpu=indptr,
        kv_lens_cpu=kv_lens,
        slots=meta.slots[row].expand(len(q_lens)).contiguous(),
        plans={},
    )


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation, has_bias", [("silu", False), ("swiglu_clamped", True)])
def test_experts_give_a_token_the_same_bits_in_any_batch(dtype, activation, has_bias):
    """72 tokens, some tiles of one expert and none of another."""
    weights = random_experts(7, 72, 40, activation, has_bias)
    packed = NATIVE.pack_experts(moved(weights, "cpu", dtype))
    assert type(packed) is native_ops.PackedExperts
    x = torch.randn(72, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.stack([torch.tensor([i % 6, 3 if i % 6 != 3 else 0]) for i in range(72)]).int()
    scales = torch.rand(72, 2, generator=torch.Generator().manual_seed(1))
    whole = NATIVE.experts(x, ids, scales, packed)
    for part in (slice(0, 1), slice(9, 60)):
        assert torch.equal(NATIVE.experts(x[part], ids[part], scales[part], packed), whole[part])
    x[3] = float("nan")
    broken = NATIVE.experts(x, ids, scales, packed)
    assert broken[3].isnan().all()
    assert torch.equal(broken[4:], whole[4:])


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window, softcap", [(None, None), (100, 5.0)])
def test_attention_gives_the_same_bits_however_a_prompt_is_cut(dtype, window, softcap):
    case = AttentionCase("", [(1, 1300), (150, 900), (60, 60)], 16, 9, 3, 64, window, softcap)
    inputs = native_case(case, dtype)
    together = NATIVE.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
    begin = 0
    for row, (q_len, _) in enumerate(case.rows):
        want = together[begin : begin + q_len]
        begin += q_len
        for q_lens in ([q_len], [1] * q_len, [q_len // 3, q_len - q_len // 3]):
            if min(q_lens) < 1:
                continue
            q, meta = as_rows(inputs, row, q_lens)
            got = NATIVE.attend(q, meta, inputs.cache, inputs.spec)
            assert torch.equal(got, want), (row, len(q_lens))


@needs_native
def test_attention_gives_the_same_bits_on_any_number_of_threads_and_page_size():
    case = AttentionCase("", [(1, 1300), (1, 40), (150, 900)], 32, 9, 3, 64)
    inputs = build_attention(case, torch.bfloat16)
    call = (inputs.q, inputs.meta, NATIVE.from_nhd(inputs.cache), inputs.spec)
    want = NATIVE.attend(*call)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(NATIVE.attend(*call), want)
    finally:
        torch.set_num_threads(before)
    for page_size in (16, 8, 1):
        parts = 32 // page_size
        table = inputs.meta.block_table.clamp(max=2**20)[..., None] * parts + torch.arange(parts)
        meta = replace(
            inputs.meta, page_size=page_size, block_table=table.flatten(1).int(), plans={}
        )
        cache = LayerCache(*(x.view(-1, page_size, 3, 64) for x in inputs.cache))
        got = NATIVE.attend(inputs.q, meta, NATIVE.from_nhd(cache), inputs.spec)
        assert torch.equal(got, want)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("page_size", [32, 8])
def test_layout_there_and_back(dtype, page_size):
    cache = LayerCache(*torch.randn(2, 5, page_size, 3, 48).to(dtype))
    kept = NATIVE.from_nhd(cache)
    is_nhd = dtype == torch.float16 or page_size == 8
    assert is_nhd == torch.equal(kept.k, cache.k)
    assert all(torch.equal(a, b) for a, b in zip(NATIVE.to_nhd(kept), cache, strict=True))


@needs_native
def test_a_broken_row_harms_no_other():
    case = AttentionCase("", [(1, 300), (1, 300), (40, 40)], 16, 9, 3, 64)
    inputs = native_case(case, torch.bfloat16)
    want = NATIVE.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
    inputs.q[1] = torch.nan
    got = NATIVE.attend(inputs.q, inputs.meta, inputs.cache, inputs.spec)
    assert got[1].isnan().all()
    assert torch.equal(got[0], want[0]) and torch.equal(got[2:], want[2:])


@needs_native
@pytest.mark.slow
def test_processors_without_bfloat16_products_get_the_same_results(monkeypatch):
    load = build.load
    monkeypatch.setattr(build, "load", lambda cpu: load(cpu, ("-mno-avx512bf16",)))
    emulated = NativeOps()
    assert emulated.probe(RUNTIME) is None
    inputs = native_case(AttentionCase("", [(1, 300), (50, 60)], 16, 9, 3, 64), torch.bfloat16)
    call = (inputs.q, inputs.meta, inputs.cache, inputs.spec)
    torch.testing.assert_close(emulated.attend(*call), NATIVE.attend(*call), rtol=1e-2, atol=1e-2)
    x, weight = torch.randn(9, 576).bfloat16(), torch.randn(64, 576).bfloat16() / 24
    results = [p.linear(x, p.pack_linear(weight, None)) for p in (emulated, NATIVE)]
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_structures_have_the_sizes_that_the_kernels_assert():
    source = build.SOURCE.read_text()
    for structure in (
        native_ops.Layer,
        native_ops.Batch,
        native_ops.DecoderLayer,
        native_ops.Experts,
    ):
        assert f"sizeof({structure.__name__}) == {ctypes.sizeof(structure)}" in source
