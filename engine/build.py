"""Puts an engine together: files, backend, weights, KV pool, scheduler, runner.

Runs on: pool, gpu.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..backends import registry
from ..backends.api import BackendError, MLASpec
from .api.config import EngineConfig
from .api.errors import RequestError, StartError
from .api.sampling_params import SamplingParams
from .core.budget import StepCost
from .core.configure import chunk_tokens, make_scheduler
from .core.scheduler import Scheduler
from .core.tiers import Tiers
from .models.decoder import Decoder
from .models.quantization import config as quantization
from .pool_sizes import pool_sizes, warn_of_idle_flags, windows_of
from .runtime import gguf_weights, kv_buffers, kv_copies, model_files, weights
from .runtime.fingerprint import fingerprint
from .runtime.runner import ModelRunner
from .runtime.stores import PageStore
from .runtime.stores.disk import DiskStore
from .runtime.stores.redis import RedisStore
from .step_log import StepLog
from .text.chat_template import ChatTemplate
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..backends.api import AttentionSpec, DeviceRuntime, LayerCache
    from ..backends.registry import Backend
    from .compile_ahead import Ahead
    from .models.config import ModelConfig

log = logging.getLogger("stoker")

Progress = Callable[[str, int, int], None]

MAX_GRAPH_ROWS = 512
STEP_LOAD_BYTES = 256 << 20  # from the host in a step while streams run: about 5 ms of PCIe 5
CPU_STEP_LOAD_BYTES = 32 << 20  # the GPU thread copies them itself


class Builder:
    """Makes one engine. `find_files` first; then `load` on the GPU thread, `load_text` anywhere.

    Args:
        progress: called with (phase, done, total).
        ahead: kernels that are being compiled by another process.

    Attributes:
        phases: seconds that each part of the start took.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        ahead: Ahead | None = None,
    ):
        self.config = config
        self._ahead = ahead
        self.phases: dict[str, float] = {}
        self._progress = progress

    def find_files(self) -> None:
        """Resolve the model argument; fetches what is not here. Raises StartError."""
        with self._phase("files"), readable(self.config.model):
            self.files = model_files.resolve(
                self.config.model, needs_weights=self.config.load_format != "dummy"
            )
            # What is wrong with flags and paths is said before weights load.
            if has_tiers(self.config) and self.files.config.delta_net is not None:
                raise StartError("a host cache keeps pages, not this model's recurrent states")
            tokenizer = self.config.tokenizer
            if tokenizer is not None and not Path(tokenizer).exists():
                raise StartError(f"--tokenizer {tokenizer}: there is no such file")
            if self.config.chat_template is not None:
                _read_template(self.config.chat_template)
        self._model = self.files.config
        if self.config.quantization is not None and self._model.quantization is not None:
            raise StartError(
                f"--quantization {self.config.quantization}: the checkpoint is quantized "
                f"already ({self._model.quantization.method})"
            )
        longest = self._model.longest_context
        asked = self.config.max_model_len
        if asked is not None and asked > longest:
            raise StartError(f"--max-model-len {asked} is more than the model's own {longest}")
        self.max_model_len = asked or self.files.config.max_position_embeddings
        self.model_name = self.files.name
        self.vocab_size = self.files.config.vocab_size
        self.default_sampling: dict[str, Any] = dict(self.files.generation)
        try:
            SamplingParams(**self.default_sampling).validate(self.vocab_size)
        except RequestError as error:
            raise StartError(f"{self.files.path}/generation_config.json: {error}") from None

    @property
    def overrides(self) -> dict[str, str]:
        """Op to the provider that --attention-backend asks for. Needs `find_files`."""
        asked = self.config.attention_backend
        is_latent = self.files.config.latent is not None
        return {} if asked is None else {"mla_attend" if is_latent else "attend": asked}

    def load_text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        """Tokenizer and chat template. Raises StartError."""
        with self._phase("tokenizer"), readable(self.config.model):
            if self.config.tokenizer is not None:
                tokenizer = Tokenizer.load(Path(self.config.tokenizer))
            elif self.files.gguf is not None:  # its metadata is read already
                tokenizer = Tokenizer.from_gguf(self.files.gguf.metadata)
            else:
                tokenizer = Tokenizer.load(self.files.tokenizer)
            tokenizer.eos_ids |= frozenset(self.files.eos_token_ids)
            self._fit(tokenizer)
            template: Any = self.files.chat_template or tokenizer.chat_templates
            owner = self.config.model
            if (path := self.config.chat_template) is not None:
                template, owner = _read_template(path), f"--chat-template {path}"
            if not template:
                return tokenizer, None
            try:
                return tokenizer, ChatTemplate(template, tokenizer.special_tokens)
            except StartError as error:
                raise StartError(f"{owner}: {error}") from None

    def _fit(self, tokenizer: Tokenizer) -> None:
        """Say what the model's vocabulary lacks of a tokenizer's."""
        size = self.vocab_size
        # Checkpoints whose embedding was not made larger with their tokenizer name such ids. They
        # have no logit, so the model never ends with one: without them it serves as it always did.
        if beyond := sorted(i for i in tokenizer.eos_ids if i >= size):
            log.warning(
                "%s: the end-of-sequence ids %s are ignored: the model's vocabulary has %d tokens",
                self.config.model,
                beyond,
                size,
            )
            tokenizer.eos_ids -= frozenset(beyond)
        # A model's own may have a few more, as Gemma 3's has for the images of larger ones.
        if self.config.tokenizer is not None and tokenizer.vocab_size > size:
            log.warning(
                "--tokenizer %s has %d tokens, the model %d: text with one of the others is "
                "answered 400",
                self.config.tokenizer,
                tokenizer.vocab_size,
                size,
            )

    def load(self) -> tuple[Scheduler, ModelRunner]:
        """Scheduler and runner, on the thread that will use them. Raises StartError."""
        config = self.config
        with self._phase("backend"):
            backend = self._backend()
            runtime = backend.runtime
        self._size(runtime)
        dtype, page_size, chunk = self._dtype, self._page_size, self._chunk
        is_cpu = runtime.device.type == "cpu"
        with self._phase("weights"):
            executor = ThreadPoolExecutor(1)
            self._quantize(backend, has_weights=config.load_format != "dummy")
            model = self._decoder(self._model, backend)
            try:
                backend.settle(_kinds(model), dtype, page_size)
            except BackendError as error:
                raise StartError(str(error)) from None
            warming = executor.submit(self._warm, backend, model)
            model.load(self._weights(model, runtime.device, dtype))
            runtime.synchronize()
            executor.shutdown(wait=False)
        working_bytes, cost = 0, StepCost()
        if not is_cpu:
            with self._phase("kernels"):
                warming.result()
            with self._phase("warm-up"):
                runner = self._small_runner(backend, model, num_states=1)
                working_bytes = runner.measure(chunk)
        with self._phase("kv pool"):
            window = self._window(model)
            sizes = pool_sizes(
                config,
                runtime,
                model,
                dtype=dtype,
                kv_dtype=self._fp8_cache or dtype,
                page_size=page_size,
                max_model_len=self.max_model_len,
                chunk=chunk,
                max_step_tokens=self._max_step_tokens,
                window=window,
                working_bytes=working_bytes,
            )
            tokens, num_slots = sizes.tokens, config.max_running_requests + 1
            num_window_pages = 1 + sizes.window_tokens // page_size if sizes.window_tokens else 0
            warn_of_idle_flags(config, sizes)
            try:
                runner = self._runner(
                    backend,
                    model,
                    1 + tokens // page_size,
                    num_window_pages,
                    num_states=num_slots + sizes.snapshots,
                )
            except MemoryError as error:
                raise StartError(f"no memory for {tokens} tokens of KV: {error}") from None
        if runtime.has_graphs and not config.disable_graphs:
            with self._phase("graphs"):
                runner.capture(self._graph_rows, chunk)
        if not is_cpu:
            with self._phase("calibration"):
                runner.calibrate(min(chunk, tokens - page_size), cost)
        tiers = None
        if has_tiers(config):
            with self._phase("cache tiers"):
                tiers = self._tiers(backend, runner, dtype)
        scheduler = make_scheduler(
            config,
            kv_tokens=tokens,
            page_size=page_size,
            max_model_len=self.max_model_len,
            is_cpu=is_cpu,
            cost=cost,
            tiers=tiers,
            num_snapshots=sizes.snapshots if model.state_spec else None,
            window=window if num_window_pages else None,
            num_window_pages=num_window_pages,
        )
        return scheduler, runner

    def walk(
        self, backend: Backend, captured: list[Callable[[], None]]
    ) -> list[Callable[[], None]]:
        """What a start launches, kernel for kernel, on a device that is not there.

        The model has as few layers as show each kind of them. Needs `find_files`.

        Args:
            captured: where the device puts what it is asked to capture.
        """
        self._size(backend.runtime)
        self._quantize(backend, has_weights=True)
        full = self._model
        kinds = [
            (
                w,
                full.moe is not None and full.moe.layers[i],
                full.delta_net is not None and full.delta_net.layers[i],
            )
            for i, w in enumerate(full.windows)
        ]
        num_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        config = replace(full, num_layers=num_layers, windows=full.windows[:num_layers])
        device = backend.runtime.device
        model = self._decoder(config, backend)
        model.load(
            (name, torch.empty(shape, device=device, dtype=model.dtypes.get(name, self._dtype)))
            for name, shape in model.shapes.items()
        )
        runner = self._small_runner(backend, model, num_states=self.config.max_running_requests + 1)
        steps: list[Callable[[], None]] = [partial(runner.walk, self._chunk)]
        steps += backend.warm_steps(_kinds(model), self._dtype, self._page_size)
        if not self.config.disable_graphs:
            runner.capture(self._graph_rows, self._chunk)
        return steps + captured

    def _quantize(self, backend: Backend, *, has_weights: bool) -> None:
        """Round weights as --quantization says, or keep a GGUF file's as they are, unless --dtype
        names another type for them.
        """
        file, config = self.files.gguf, self.config
        if config.quantization is not None:
            is_cpu = backend.runtime.device.type == "cpu"
            blocks = backend.ops.gguf_types if is_cpu else frozenset()
            chosen = quantization.online(config.quantization, blocks)
            if file is not None:
                log.info("weights that the file holds in few bits are rounded a second time")
            self._model = replace(self._model, quantization=chosen)
            return
        if file is None or config.dtype != "auto" or not has_weights:
            return
        if self._model.quantization is None:
            self._model = gguf_weights.keep_packed(file, self._model, backend.ops)

    def _decoder(self, config: ModelConfig, backend: Backend) -> Decoder:
        device, length = backend.runtime.device, self.max_model_len
        return Decoder(config, backend.ops, device, self._dtype, length, self._fp8_cache)

    def _size(self, runtime: DeviceRuntime) -> None:
        """Sizes that the device decides, where the configuration does not."""
        config = self.config
        saved = getattr(torch, self.files.config.dtype)
        self._dtype = (
            runtime.default_dtype(saved) if config.dtype == "auto" else getattr(torch, config.dtype)
        )
        self._fp8_cache = None
        if config.kv_cache_dtype != "auto":
            self._fp8_cache = fp8 = runtime.facts.fp8
            flag = f"--kv-cache-dtype {config.kv_cache_dtype}"
            if fp8 is None:
                raise StartError(f"{flag}: {runtime.description} does not compute in fp8")
            if self.files.config.latent is not None:
                raise StartError(f"{flag}: latent attention keeps its cache in the model's type")
        self._page_size = config.page_size or runtime.default_page_size
        self._max_pages = -(-self.max_model_len // self._page_size)
        is_cpu = runtime.device.type == "cpu"
        self._chunk = chunk_tokens(config, is_cpu=is_cpu)
        self._max_step_tokens = self._chunk + config.max_running_requests
        if not is_cpu:
            self._chunk = min(self._chunk, self._max_pages * self._page_size)
        self._graph_rows = min(config.max_running_requests, MAX_GRAPH_ROWS)

    def _warm(self, backend: Backend, model: Decoder) -> None:
        """Compile and load kernels while weights come."""
        if self._ahead is not None:
            self._ahead.wait()
        backend.warm(_kinds(model), self._dtype, self._page_size)

    def _window(self, model: Decoder) -> int | None:
        """The longest window of a model's layers, if these are to have a KV pool of their own."""
        if self.config.window_kv_ratio == 1 or has_tiers(self.config) or model.state_spec:
            return None
        window = max(filter(None, windows_of(model)), default=self.max_model_len)
        return window if window < self.max_model_len else None

    def _small_runner(self, backend: Backend, model: Decoder, *, num_states: int) -> ModelRunner:
        """With pages for a step of one chunk."""
        few = 2 + self._chunk // self._page_size
        num_window_pages = few if self._window(model) else 0
        return self._runner(backend, model, few, num_window_pages, num_states=num_states)

    def _runner(
        self,
        backend: Backend,
        model: Decoder,
        num_pages: int,
        num_window_pages: int,
        *,
        num_states: int,
    ) -> ModelRunner:
        """Model and pools; without window pages all layers have the same."""
        dtype, device = self._dtype, backend.runtime.device
        kv_dtype = self._fp8_cache or dtype
        pools: list[LayerCache] = []
        for shape, window in zip(model.kv_spec, windows_of(model), strict=True):
            n = num_window_pages if window and num_window_pages else num_pages
            pools += kv_buffers.allocate([shape], n, self._page_size, kv_dtype, device)
        return ModelRunner(
            model,
            backend.ops,
            backend.runtime,
            kv_buffers.with_states(pools, model.state_spec, num_states, dtype, device),
            num_slots=self.config.max_running_requests + 1,
            max_pages=self._max_pages,
            page_size=self._page_size,
            max_step_tokens=self._max_step_tokens,
            num_window_pages=num_window_pages,
        )

    def _tiers(self, backend: Backend, runner: ModelRunner, dtype: torch.dtype) -> Tiers:
        """The tiers that the flags ask for; gives the runner their copies. Raises StartError."""
        config, files = self.config, self.files
        page_size = runner.inputs.page_size
        attend = backend.choices["attend"].provider
        provider = next(p for p in backend.providers if p.name == attend)
        is_dummy = config.load_format == "dummy"
        key = fingerprint(
            [] if is_dummy else files.weights,
            config=repr(self._model),
            dummy=[config.seed, backend.runtime.name] if is_dummy else None,
            dtype=str(dtype),
            kv_layout=getattr(provider, "kv_layout", "NHD"),
            pools=[[str(p.dtype), *p.shape[1:]] for cache in runner.pools for p in cache],
            page_size=page_size,
        )
        num_bytes = kv_copies.RecordLayout(runner.pools).record_bytes
        num_pages = runner.pools[0].k.shape[0]
        if config.host_cache_gib is not None:
            num_slots = int(config.host_cache_gib * 2**30) // num_bytes
        else:
            num_slots = int((config.host_cache_ratio or 0) * (num_pages - 1))
        if num_slots < 1:
            raise StartError(f"the host cache is smaller than a page ({num_bytes / 2**20:.1f} MiB)")
        stores: list[PageStore] = []
        if config.disk_cache_dir is not None:
            folder = Path(config.disk_cache_dir).expanduser()
            stores.append(DiskStore(folder, key, int(config.disk_cache_gib * 2**30)))
        if config.cache_redis_url is not None:
            stores.append(RedisStore(config.cache_redis_url))
        runner.copies = kv_copies.KVCopies(
            runner.pools, backend.runtime, backend.ops, num_slots, stores, key
        )
        step_bytes = STEP_LOAD_BYTES if backend.runtime.is_async else CPU_STEP_LOAD_BYTES
        return Tiers(
            num_pages=num_pages,
            page_size=page_size,
            num_slots=num_slots,
            fingerprint=key,
            policy=config.cache_write_policy,
            write_hits=config.cache_write_hits,
            stores=tuple(store.name for store in stores),
            prefetch_s=config.prefetch_timeout,
            max_load_pages=max(step_bytes // num_bytes, 1),
            max_saving=max(min(2 * kv_copies.STAGING_BYTES, step_bytes) // num_bytes, 1),
        )

    def open_step_log(self, scheduler: Scheduler, runner: ModelRunner) -> StepLog | None:
        """The log that --step-log asks for. Raises StartError."""
        config, runtime = self.config, runner.runtime
        if config.step_log is None:
            return None
        engine = {
            "model": self.model_name,
            "backend": runtime.name,
            "is_cpu": runtime.device.type == "cpu",
            "page_size": scheduler.page_size,
            "kv_tokens": scheduler.pool.capacity * scheduler.page_size,
            "max_model_len": self.max_model_len,
            "config": config.model_dump(mode="json", include=set(EngineConfig.model_fields)),
        }
        is_async = runtime.is_async and not config.disable_overlap
        return StepLog(Path(config.step_log), engine, is_async=is_async)

    def _backend(self) -> Backend:
        try:
            backend = registry.select(self.config.backend, self.overrides)
        except BackendError as error:
            raise StartError(str(error)) from None
        if hasattr(backend.runtime, "set_threads"):
            backend.runtime.set_threads(self.config.threads)
        elif self.config.threads is not None:
            raise StartError(f"--threads is for the cpu backend, not for {backend.runtime.name}")
        return backend

    def _weights(self, model: Decoder, device: torch.device, dtype: torch.dtype) -> weights.Weights:
        files = self.files
        progress = None if self._progress is None else partial(self._progress, "weights")
        if self.config.load_format == "dummy":
            seed, dtypes = self.config.seed, model.dtypes
            return weights.dummy(model.shapes, self._model, device, dtype, seed, dtypes)
        if files.gguf is not None:
            return gguf_weights.from_gguf(files.gguf, self._model, dtype, progress)
        return weights.from_safetensors(list(files.weights), self._model, progress)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - began


@contextmanager
def readable(model: str) -> Iterator[None]:
    """What a model's files make of us is said in one line, whatever they hold: StartError."""
    try:
        yield
    except OSError as error:  # a folder by a file's name, or no right to read one
        raise StartError(f"{model}: its files cannot be read: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = type(error).__name__
        log.debug("a model's files", exc_info=True)
        raise StartError(f"{model}: its files make no sense ({kind}: {error})") from error


def _read_template(path: str) -> str:
    """The file that --chat-template names. Raises StartError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(f"--chat-template {path} cannot be read: {reason}") from None


def has_tiers(config: EngineConfig) -> bool:
    """Whether pages are kept below the device. Raises StartError where flags do not fit."""
    is_wanted = config.host_cache_ratio is not None or config.host_cache_gib is not None
    if config.host_cache_ratio is not None and config.host_cache_gib is not None:
        raise StartError("--host-cache-ratio and --host-cache-gib say the same: give one of them")
    if not is_wanted and (config.disk_cache_dir or config.cache_redis_url):
        raise StartError(
            "--disk-cache-dir and --cache-redis-url go through host memory: they need "
            "--host-cache-ratio or --host-cache-gib"
        )
    if is_wanted and config.disable_radix_cache:
        raise StartError("--disable-radix-cache leaves nothing for the host cache to keep")
    return is_wanted


def build_modules(config: EngineConfig) -> list[str]:
    """Have a backend's libraries compile what serving this model needs, which may take minutes.

    Returns:
        The names of what was compiled.

    Raises:
        StartError: the model's config cannot be read, the backend cannot run, a compiler fails.
    """
    builder = Builder(config)
    builder.find_files()
    try:
        backend = registry.select(config.backend)
        builder._size(backend.runtime)
        model = Decoder(
            builder.files.config, backend.ops, torch.device("meta"), builder._dtype, max_positions=1
        )
        return registry.build(backend.runtime.name, _kinds(model), builder._dtype)
    except BackendError as error:
        raise StartError(str(error)) from None


def _kinds(model: Decoder) -> list[AttentionSpec | MLASpec]:
    """One attention layer of each kind."""
    latent = {s for s in model.attention_specs if isinstance(s, MLASpec)}
    others = [s for s in model.attention_specs if not isinstance(s, MLASpec)]
    return [*{(s.window, s.softcap, s.head_dim): s for s in others}.values(), *latent]


def check_each_step(config: EngineConfig) -> bool:
    """Whether the ledger is verified after every step."""
    return config.check or os.environ.get("STOKER_CHECK") == "1"
