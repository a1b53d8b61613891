"""The XPU backend on a machine without an Intel GPU: its own parts, and both packages' calls."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import aiter_package
import old_triton_xpu
import pytest
import torch
import xpu_package
from proofs import prove
from targets import Target

import stoker.backends
from stoker.backends import registry, xpu
from stoker.backends import triton as triton_ops
from stoker.backends.api import AttentionSpec, BackendError, LayerCache
from stoker.backends.contract.cases import AttentionCase, build_attention
from stoker.backends.contract.checks import checks
from stoker.backends.reference import ReferenceOps
from stoker.backends.triton import arch
from stoker.backends.xpu import package

HERE = Path(__file__).parent
OURS = Path(next(iter(stoker.backends.__path__)), "xpu")
PROPERTIES = SimpleNamespace(
    name="Intel(R) Arc(TM) B580 Graphics",
    sub_group_sizes=[16, 32],
    local_mem_size=131_072,
    has_bfloat16_conversions=True,
    max_compute_units=160,
    total_memory=12 << 30,
)


@pytest.fixture
def sycl(monkeypatch):
    """A build of torch for Intel GPUs with one B580."""
    monkeypatch.setattr(torch.version, "xpu", "20250301", raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: PROPERTIES)


def test_without_an_intel_gpu_one_line_says_what_is_missing(monkeypatch):
    with pytest.raises(BackendError, match=r"backend xpu cannot run here: .*torch\.version\.xpu"):
        registry.select("xpu")
    monkeypatch.setattr(torch.version, "xpu", "20250301", raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(BackendError, match="no Intel GPU that SYCL can use"):
        registry.select("xpu")


def test_the_device(sycl, monkeypatch):
    runtime = xpu.runtime()
    assert runtime.device == torch.device("xpu", 0)
    assert runtime.description == "Intel(R) Arc(TM) B580 Graphics, 160 compute units, 12 GiB"
    assert runtime.facts.dist_backend == "xccl" and runtime.is_async and not runtime.has_graphs
    assert (runtime.facts.warp_size, runtime.facts.shared_bytes) == (32, 131_072)
    assert runtime.default_dtype(torch.float32) == torch.bfloat16
    assert runtime.default_dtype(torch.float16) == torch.float16
    monkeypatch.setenv(xpu.GRAPHS, "1")
    assert xpu.runtime().has_graphs
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (3, 9))
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda _: 5)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda _: 4)
    assert runtime.memory() == (4, 9)


def test_an_arc_a770_has_float16(sycl, monkeypatch):
    old = SimpleNamespace(**{**vars(PROPERTIES), "name": "Intel(R) Arc(TM) A770 Graphics"})
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: old)
    assert xpu.runtime().default_dtype(torch.bfloat16) == torch.float16


def test_auto_takes_xpu_where_cuda_and_rocm_say_no(sycl, monkeypatch):
    monkeypatch.delitem(triton_ops.VENDORS, "xpu")  # PyPI's Triton has no backend for it
    backend = registry.select("auto")
    assert backend.runtime.name == "xpu"
    chosen = {op: choice.provider for op, choice in backend.choices.items()}
    for op in ("attend", "write_qkv", "experts", "quantized_linear", "sample"):
        assert chosen[op] == "triton", op
    assert chosen["linear"] == "onednn"
    reasons = backend.choices["attend"].passed_over
    assert reasons == {"vllm-xpu": "vllm-xpu-kernels is not installed"}


def test_where_nothing_is_installed_torch_serves(sycl, monkeypatch):
    monkeypatch.setattr(xpu.TritonOps, "probe", lambda *_: "triton is not installed")
    choices = registry.select("xpu").choices
    assert choices["attend"].provider == "sdpa"
    assert choices["attend"].passed_over["triton"] == "triton is not installed"
    assert choices["write_qkv"].provider == "torch"


def test_providers_are_for_their_device():
    cuda = SimpleNamespace(name="cuda", facts=None, device=torch.device("cuda"))
    for provider in xpu.providers():
        is_portable = provider.name in ("triton", "torch")
        assert is_portable or provider.probe(cuda) == "not an Intel GPU"


def test_a_graph_is_warmed_on_the_stream_that_captures_it(sycl, monkeypatch):
    said, current = [], ["default"]

    @contextmanager
    def on(name):
        current.append(name)
        yield
        current.pop()

    def make_stream(device):
        return SimpleNamespace(name="of captures", wait_stream=lambda other: None)

    monkeypatch.setattr(torch.xpu, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.xpu, "Stream", make_stream)
    monkeypatch.setattr(torch.xpu, "current_stream", lambda _: make_stream(None))
    monkeypatch.setattr(torch.xpu, "stream", lambda stream: on(stream.name))
    monkeypatch.setattr(torch.xpu, "graph", lambda graph, pool, stream: on(f"capture, {pool}"))
    monkeypatch.setattr(torch.xpu, "XPUGraph", lambda: SimpleNamespace(replay=lambda: None))
    runtime = xpu.runtime()
    for _ in range(2):
        runtime.capture(lambda: said.append(current[-1]))
    assert said == ["of captures", "capture, pool"] * 2


def test_triton_s_target(monkeypatch):
    """Its arch is a dict."""
    known = {"name": PROPERTIES.name, "max_compute_units": 160, "local_mem_size": 131_072}
    target = SimpleNamespace(backend="xpu", arch=known)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(arch.triton.runtime, "driver", driver)
    monkeypatch.setattr(arch.triton.knobs.runtime, "interpret", False)
    assert arch.current_arch.__wrapped__() == ("xpu", 131_072, 160)


def test_a_triton_of_another_vendor_is_told(monkeypatch):
    """PyPI's has no backend for Intel GPUs, which it says before a kernel fails."""
    monkeypatch.setattr(
        triton_ops.importlib.util, "find_spec", lambda n: None if "intel" in n else n
    )
    runtime = SimpleNamespace(name="xpu", device=torch.device("meta"))
    assert "no intel backend" in triton_ops.TritonOps().probe(runtime)
    assert triton_ops.TritonOps().probe(SimpleNamespace(name="rocm", device=runtime.device)) is None


# ---- plain torch, on the CPU

RUNTIME = SimpleNamespace(name="xpu", device=torch.device("cpu"), facts=xpu.facts(PROPERTIES))
PRODUCTS = xpu.OneDnnOps()
PRODUCTS._beside = ReferenceOps()  # norms and gates around them are our kernels, tested elsewhere
EMULATED = [Target(RUNTIME, ops, (("xpu", "emulated"),)) for ops in (PRODUCTS, xpu.SdpaOps())]
CHECKS = [
    pytest.param(target, check, id=f"{target.provider.name}-{check}")
    for target in EMULATED
    for check in checks()
    if check.missing(target) is None and not re.search(r"-float(16|32)$", str(check))
]


@pytest.mark.parametrize("target, check", CHECKS)
def test_plain_torch(target, check):
    assert check.run(target) <= 1


# ---- vllm-xpu-kernels

SELECTED = (
    "test_op and (bfloat16 or route) and (rms_norm or _and_mul or route or experts or write_qkv"
    " or attend) and not (mla or linear or quantized or decoder or norm_experts) or not test_op"
)


def test_the_contract_s_checks_on_its_schemas_and_python():
    xpu_package.unpacked()
    options = ["-p", "xpu_emulated", "-k", SELECTED]
    passes([*options, str(HERE / "test_contract.py"), str(HERE / "xpu_cases.py")])


def test_our_kernels_compile_for_intel_gpus():
    folder = old_triton_xpu.unpacked()
    passes(["-p", "old_triton_xpu", str(HERE / "xpu_compiled.py")], folder)


def passes(arguments, *folders):
    """In a process of its own, which finds packages in these folders first."""
    path = os.pathsep.join(map(str, [*folders, HERE, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def test_every_name_of_the_package_is_in_the_checked_table():
    used, known = set(), {c.name for c in package.CALLABLES}
    for file in OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "package":
                    used.add(node.attr)
                assert node.attr != "ops" or file.name == "package.py", f"torch.ops in {file.name}"
            if isinstance(node, ast.Constant) and node.value == package.MODULE:
                assert file.name == "package.py", f"{package.MODULE} in {file.name}"
    assert used - {"Callable", "CALLABLES", "reason_against"} == known


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that packages are imported from, without the real one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == package.MODULE]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_a_package_that_is_too_old_or_broken_is_a_reason(site):
    assert package.reason_against() == "vllm-xpu-kernels is not installed"
    (site / package.MODULE).mkdir()
    (site / package.MODULE / "__init__.py").touch()
    about = site / "vllm_xpu_kernels-0.1.9.dist-info"
    about.mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm-xpu-kernels\nVersion: 0.1.9\n"
    (about / "METADATA").write_text(metadata)
    assert package.reason_against() == "vllm-xpu-kernels 0.1.9 is older than 0.1.12"
    (about / "METADATA").write_text(metadata.replace("0.1.9", "0.1.16"))
    reason = package.reason_against()
    assert "0.1.16 cannot be imported beside torch" in reason and "_C" in reason


# ---- IPEX

SIGNATURES = json.loads((HERE.parent / "data/ipex_signatures.json").read_text())["functions"]


class PagedAttention:
    """Takes what the real one takes, and notes it."""

    def __init__(self):
        self.called = {}

    def __getattr__(self, name):
        signature = aiter_package.signature(SIGNATURES[name])

        def call(*args, **kwargs):
            self.called[name] = signature.bind(*args, **kwargs).arguments

        return call


def ipex_calls(rows):
    """What IpexOps passes for a batch of such rows, by name of function and argument."""
    ops = xpu.IpexOps()
    ops._paged = PagedAttention()
    inputs = build_attention(AttentionCase("", rows, 16, 4, 2, 64, window=7), torch.bfloat16)
    cache = ops.from_nhd(inputs.cache)
    assert torch.equal(ops.to_nhd(cache).k.nan_to_num(), inputs.cache.k.nan_to_num())
    ops.write_qkv(inputs.qkv, inputs.meta, cache, inputs.spec, None, None, None, 1e-6)
    ops.attend(inputs.q, inputs.meta, cache, inputs.spec)
    return ops._paged.called


def test_our_calls_of_ipex_bind():
    decode, mixed = ipex_calls([(1, 40), (1, 3)]), ipex_calls([(1, 40), (5, 21)])
    assert set(decode) | set(mixed) == set(SIGNATURES)
    given = decode["single_query_cached_kv_attention"]
    assert given["block_size"] == 16 and given["window_size"] == 6
    assert given["head_mapping"].tolist() == [0, 0, 1, 1]
    assert given["key_cache"].shape[1:] == (2, 16, 64)
    given = mixed["flash_attn_varlen_func"]
    assert given["cu_seqlens_kv"].tolist() == [0, 40, 61] and given["is_cusal"] is True
    assert (given["window_size_left"], given["window_size_right"]) == (6, 0)
    for op in ("attend", "write_qkv"):
        prove("xpu", op, "ipex", "signature-only")


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_of_ipex_that_is_wrong_would_be_seen(name):
    signature = aiter_package.signature(SIGNATURES[name])
    required = [n for n, p in signature.parameters.items() if p.default is inspect.Parameter.empty]
    call = getattr(PagedAttention(), name)
    call(*required)
    with pytest.raises(TypeError, match=required[-1]):
        call(*required[:-1])
    with pytest.raises(TypeError, match="renamed"):
        call(*required, renamed=1)


def test_ipex_is_taken_only_where_it_is_asked_for():
    ops, spec = xpu.IpexOps(), AttentionSpec(8, 2, 64, 0.125)
    for specs, page_size, is_forced, reason in (
        ([spec], 16, False, "--attention-backend ipex"),
        ([spec], 128, True, "--page-size 16, 32, 64, not 128"),
        ([AttentionSpec(8, 2, 64, 0.125, sinks=torch.zeros(8))], 16, True, "no sinks"),
        ([AttentionSpec(8, 2, 64, 0.125, window=1)], 16, True, "window of one"),
    ):
        said = ops.settle(specs, torch.bfloat16, page_size, RUNTIME, is_forced=is_forced)
        assert reason in said
    assert ops.settle([spec], torch.bfloat16, 64, RUNTIME, is_forced=True) is None


def test_ipex_s_own_cpu_kernels_under_our_calls():
    """A real run, where there is an interpreter for it: see docs/install-xpu.md."""
    if not (python := os.environ.get("STOKER_IPEX_PYTHON")):
        pytest.skip("STOKER_IPEX_PYTHON names no interpreter with torch 2.8 and IPEX")
    folder = next(iter(stoker.__path__))
    done = subprocess.run(
        [python, str(HERE / "ipex_run.py"), str(Path(folder).parent)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) >= 60


def test_caches_keep_their_order():
    x = torch.arange(2 * 16 * 3 * 8.0).view(2, 16, 3, 8)
    kept = xpu.IpexOps().from_nhd(LayerCache(x, x + 1))
    assert torch.equal(kept.k.view(2, 3, 16, 8).transpose(1, 2), x)
