"""The ROCm backend's own parts, on a machine without ROCm."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from targets import Target

from stoker.backends import registry, rocm
from stoker.backends.api import BackendError, QuantizedWeight
from stoker.backends.contract.checks import checks
from stoker.backends.quantized import dequantize
from stoker.backends.reference import ReferenceOps
from stoker.backends.rocm import fp8
from stoker.backends.triton import TritonOps

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def properties(arch):
    return SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName=f"{arch}:sramecc+:xnack-",
        multi_processor_count=304,
        total_memory=192 << 30,
    )


@pytest.fixture
def hip(monkeypatch):
    """A build of torch for ROCm with one MI300X, whose capability looks like an H100's."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties("gfx942"))


def test_without_rocm_one_line_says_what_is_missing(monkeypatch):
    with pytest.raises(BackendError, match=r"backend rocm cannot run here: .*torch\.version\.hip"):
        registry.select("rocm")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no AMD GPU that HIP can use"):
        registry.select("rocm")


def test_the_device(hip):
    runtime = rocm.runtime()
    assert runtime.device == torch.device("cuda", 0)
    assert runtime.description == "AMD Instinct MI300X, gfx942, 192 GiB"
    assert runtime.facts.dist_backend == "nccl" and runtime.has_graphs and runtime.is_async
    assert runtime.default_dtype(torch.float32) == torch.bfloat16
    assert runtime.default_dtype(torch.float16) == torch.float16


def test_auto_takes_rocm_where_cuda_says_no(hip):
    with pytest.raises(BackendError, match="this build of torch is for ROCm"):
        registry.select("cuda")
    backend = registry.select("auto")
    assert backend.runtime.name == "rocm"
    assert backend.choices["attend"].provider == "triton"
    assert backend.choices["attend"].passed_over == {"aiter": "amd-aiter is not installed"}
    assert backend.choices["linear"].provider == "hipblaslt"


@pytest.mark.parametrize(
    "arch, warp_size, shared_bytes, kind",
    [
        ("gfx90a", 64, 65_536, None),
        ("gfx942", 64, 65_536, FNUZ),
        ("gfx950", 64, 163_840, FN),
        ("gfx1100", 32, 65_536, None),
        ("gfx1201", 32, 65_536, FN),
    ],
)
def test_facts(arch, warp_size, shared_bytes, kind):
    facts = rocm.facts(arch)
    assert (facts.warp_size, facts.shared_bytes, facts.fp8) == (warp_size, shared_bytes, kind)


def test_aiter_is_for_its_architectures_alone():
    old = SimpleNamespace(name="rocm", facts=rocm.facts("gfx90a"), device=torch.device("cuda"))
    assert rocm.AiterOps().probe(old) == "its kernels are for gfx942 and gfx950, not for gfx90a"
    cuda = SimpleNamespace(name="cuda", facts=None, device=torch.device("cuda"))
    for provider in rocm.providers():
        is_portable = provider.name in ("triton", "torch")
        assert is_portable or provider.probe(cuda) == "not a ROCm device"


def test_a_graph_is_warmed_on_the_stream_that_captures_it(hip, monkeypatch):
    """AITER's workspaces are by stream, and nothing may be compiled within a capture."""
    said, current = [], ["default"]

    @contextmanager
    def on(stream, name="stream"):
        current.append(name)
        yield
        current.pop()

    @contextmanager
    def graph(graph, pool, stream):
        assert pool == "pool" and stream.name == "of captures"
        current.append("capture")
        yield
        current.pop()

    def make_stream(device):
        return SimpleNamespace(name="of captures", wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: make_stream(None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: on(stream, stream.name))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    runtime = rocm.runtime()
    for _ in range(2):
        runtime.capture(lambda: said.append(current[-1]))
    assert said == ["of captures", "capture"] * 2


# ---- fp8


def test_every_code_means_half():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = codes[codes & 0x7F != 0x7F].view(FN)
    halves = fp8.to_fnuz(codes)
    assert halves.dtype == FNUZ and halves.float().isfinite().all()
    assert torch.equal(2 * halves.float(), codes.float())
    assert halves.view(torch.uint8)[codes.view(torch.uint8) == 0x80].item() == 0


def test_nan_is_refused():
    with pytest.raises(BackendError, match="NaN"):
        fp8.to_fnuz(torch.tensor([1.0, float("nan")]).to(FN))


def test_a_weight_keeps_its_values():
    codes = torch.randn(32, 64).to(FN)
    scales, fixed = torch.rand(32, 1) + 0.1, torch.tensor([0.5])
    weight = QuantizedWeight("fp8", codes, (32, 64), scales, None, (1, 64), "tensor", fixed)
    native = fp8.weight_to_fnuz(weight)
    assert native.codes.dtype == FNUZ and native.input_scale == 1.0
    assert torch.equal(dequantize(native), dequantize(weight))
    assert fp8.weight_to_fnuz(native) is native


def test_our_kernels_get_native_weights_on_gfx942_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(TritonOps, "pack_quantized", lambda self, w, b: seen.append(w), False)
    weight = QuantizedWeight("fp8", torch.zeros(8, 8).to(FN), (8, 8), torch.ones(1, 1))
    for arch in ("gfx942", "gfx950", "gfx90a"):
        ops = rocm.RocmTritonOps()
        runtime = SimpleNamespace(name="rocm", facts=rocm.facts(arch), device=torch.device("cuda"))
        ops.probe(runtime)
        ops.pack_quantized(weight, None)
    assert [w.codes.dtype for w in seen] == [FNUZ, FN, FN]


# ---- products through torch, on the CPU

RUNTIME = SimpleNamespace(name="rocm", device=torch.device("cpu"), facts=rocm.facts("gfx942"))
PRODUCTS = rocm.HipblasltOps()
PRODUCTS._beside = ReferenceOps()  # norms and gates around them are our kernels, tested elsewhere
EMULATED = [
    Target(RUNTIME, PRODUCTS, (("rocm", "emulated"),)),
    Target(RUNTIME, ReferenceOps(), tuple((b, "emulated") for b in ("cuda", "rocm", "xpu"))),
]
CHECKS = [check for check in checks() if not re.search(r"-float(16|32)$", str(check))]


@pytest.mark.parametrize("target", EMULATED, ids=lambda t: t.provider.name)
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_plain_torch(target, check):
    if reason := check.missing(target):
        pytest.skip(reason)
    assert check.run(target) <= 1  # plain torch serves all
