"""The engine's configuration. Flags, environment and file are all derived from these fields.

Runs on: any (pure).
"""

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .errors import StartError


def option(default, help: str, group: str, **limits):  # noqa: A002 (help is argparse's word)
    """A configuration field: default, help text, help group, and pydantic's bounds."""
    return Field(default, description=help, json_schema_extra={"group": group}, **limits)


class EngineConfig(BaseModel):
    """How to run one model. Frozen: what is measured at start lives elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def of(cls, **options: Any) -> Self:
        """From keyword arguments. Raises StartError: one line, of the first that is wrong."""
        try:
            return cls(**options)
        except ValidationError as error:
            raise StartError(explain(error)) from None

    model: str = option(
        "smollm2-135m",
        "a folder with config.json and safetensors, a .gguf file, a Hugging Face id "
        "(org/name, org/name@revision), or a short name (smollm2-135m, gemma3-270m)",
        "model",
    )
    tokenizer: str | None = option(
        None,
        "another tokenizer than the model's own: a folder, a tokenizer.json, or a .gguf file",
        "model",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: random weights (normal, 0.02), for speed tests", "model"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "type of weights and activations; with auto, a GGUF file's weights stay packed where the "
        "backend multiplies them so, else they are dequantized to this type",
        "model",
    )
    quantization: Literal["fp8", "int8", "int4"] | None = option(
        None,
        "round the weights of linears when they are loaded (fp8, int8: inputs, too); not for "
        "checkpoints that are quantized already",
        "model",
    )
    max_model_len: int | None = option(
        None, "longest context in tokens; the model's own by default", "model", ge=8
    )
    chat_template: str | None = option(
        None, "file with a jinja chat template that replaces the model's", "model"
    )
    backend: Literal["auto", "cpu", "cuda", "rocm", "xpu"] = option(
        "auto", "hardware; auto takes the first that works", "device"
    )
    attention_backend: str | None = option(
        None,
        "provider of attention, as flashinfer or triton (see stoker backends); auto: the fastest",
        "device",
    )
    threads: int | None = option(
        None, "threads of the cpu backend; all cores by default", "device", ge=1, le=1024
    )
    max_running_requests: int = option(
        256, "most requests that are computed at once", "scheduling", ge=1, le=8192
    )
    max_queued_requests: int = option(
        4096, "requests that may wait; more are answered 503", "limits", ge=1
    )
    max_queued_tokens: int | None = option(
        None, "prompt tokens that may wait; more are answered 503", "limits", ge=1
    )
    queue_timeout: float | None = option(
        None, "seconds that a request may wait for its first turn; then 503", "limits", gt=0
    )
    watchdog_s: float = option(
        300.0,
        "a GPU thread that gets nowhere for so long ends the process (code 70), after a dump of "
        "all threads' stacks",
        "limits",
        ge=1,
    )
    page_size: int | None = option(
        None, "tokens a KV page; the backend's best by default", "memory", ge=1, le=256
    )
    kv_tokens: int | None = option(
        None, "size of the KV pool in tokens; measured by default", "memory", ge=16
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = option(
        "auto",
        "type of keys and values; fp8_e4m3 holds twice as many tokens (on GPUs; by the "
        "checkpoint's scales, where it has some)",
        "memory",
    )
    mem_fraction: float = option(
        0.9,
        "share of the free device memory that weights and KV pool may use",
        "memory",
        gt=0.0,
        le=0.98,
    )
    window_kv_ratio: float = option(
        0.3,
        "where some layers see a window of the context only: tokens that they have room for, as a "
        "share of those of the others; 1 gives all layers the same",
        "memory",
        gt=0.0,
        le=1.0,
    )
    state_snapshots: int | None = option(
        None,
        "for models with recurrent layers: states that the prefix cache keeps, to go on from; by "
        "default what a quarter of the memory for KV holds, at most two a running request",
        "memory",
        ge=0,
    )
    host_cache_ratio: float | None = option(
        None, "keep evicted prefixes in host memory: so many times the KV pool", "tiers", gt=0
    )
    host_cache_gib: float | None = option(
        None, "the same as a size in GiB, instead of a ratio", "tiers", gt=0
    )
    cache_write_policy: Literal["write-through", "write-through-selective", "write-back"] = option(
        "write-through",
        "copy cached pages to the host at once, when they were hit often enough, or when they are "
        "evicted",
        "tiers",
    )
    cache_write_hits: int = option(
        2, "hits at which write-through-selective copies a page", "tiers", ge=1
    )
    disk_cache_dir: str | None = option(
        None, "folder for pages that outlive the process; needs a host cache", "tiers"
    )
    disk_cache_gib: float = option(
        16.0, "size of that folder; the least recently used pages go", "tiers", gt=0
    )
    cache_redis_url: str | None = option(
        None, "Redis server that keeps pages, as redis://host:6379/0; needs a host cache", "tiers"
    )
    prefetch_timeout: float = option(
        2.0,
        "seconds that a waiting request gives disk and Redis to deliver its prefix (and 0.1 s more "
        "for each 1,000 tokens)",
        "tiers",
        gt=0,
    )
    radix_eviction_policy: Literal["lru", "lfu", "slru", "fifo", "priority", "tlru"] = option(
        "lru",
        "which cached prefix is forgotten first: the least recently used; the least often used; "
        "those used less than twice; the oldest; those of the lowest priority; tails whose "
        "absence a conversation's next turn would not notice",
        "memory",
    )
    tlru_threshold: int = option(
        2048, "for tlru: tokens that a next turn may have to compute", "memory", ge=0
    )
    tlru_next_prompt: int = option(
        256, "for tlru: tokens that a next turn is expected to add", "memory", ge=0
    )
    warm_prefixes: str | None = option(
        None,
        "file of prompts that are computed at the start and stay cached: a JSON object a line with "
        "prompt or messages, and pin (1; higher is kept longer) and cache_salt if needed",
        "memory",
    )
    cache_events: bool = option(
        False, "tell what enters and leaves the prefix cache (GET /cache_events)", "memory"
    )
    disable_radix_cache: bool = option(False, "compute every prompt from its first token", "memory")
    chunked_prefill_size: int | None = option(
        None, "most new tokens a step; the backend's best by default", "scheduling", ge=1
    )
    max_step_ms: float | None = option(
        None,
        "while streams run, prompts are cut so that a step takes no longer than this "
        "(default: 36 on a GPU, more while many requests wait; no limit on a CPU)",
        "scheduling",
        gt=0,
    )
    prefill_decode_interval: int = option(
        0, "steps without prompts after each step with one, while streams run", "scheduling", ge=0
    )
    schedule_conservativeness: float = option(
        1.0,
        "above 1 admits fewer requests, so that fewer are retracted",
        "scheduling",
        ge=0.1,
        le=10,
    )
    schedule_policy: Literal[
        "fcfs", "lpm", "dfs-weight", "lof", "hrrn", "shortest-prefill-first", "random"
    ] = option(
        "fcfs",
        "who of those that wait at equal priority is next: the first come; the longest cached "
        "prefix; the most crowded branch of the cache; the longest output; the highest ratio of "
        "waiting to work; the least to compute; anybody",
        "scheduling",
    )
    priority_preemption: int | None = option(
        None,
        "a waiting request takes the place of running ones whose priority is at least so much "
        "lower, if it does not fit beside them; never by default",
        "scheduling",
        ge=1,
    )
    fair_clients: bool = option(
        False, "the client (API key or user) that has received least is next", "scheduling"
    )
    client_weights: str = option(
        "", "shares of clients for --fair-clients, as alice=4,bob=0.5; 1 for others", "scheduling"
    )
    grammar_backend: Literal["xgrammar", "llguidance"] = option(
        "xgrammar",
        "which library enforces structured output; what it cannot enforce goes to the other",
        "structured output",
    )
    grammar_timeout: float = option(
        4.0,
        "seconds in which a grammar must be compiled; more is answered 400",
        "structured output",
        gt=0,
    )
    disable_graphs: bool = option(
        False, "launch decode steps kernel by kernel (same tokens, for debugging)", "device"
    )
    disable_overlap: bool = option(
        False,
        "plan a step only when the one before has ended (same tokens, for debugging)",
        "scheduling",
    )
    seed: int = option(0, "seeds dummy weights and --schedule-policy random", "model")
    check: bool = option(
        False, "verify the page ledger after every step (slow; also STOKER_CHECK=1)", "debug"
    )
    step_log: str | None = option(
        None, "write each step's size and time into this file, for stoker simulate", "debug"
    )

    @field_validator(
        "model",
        "tokenizer",
        "chat_template",
        "disk_cache_dir",
        "cache_redis_url",
        "warm_prefixes",
        "step_log",
    )
    @classmethod
    def _check_place(cls, value: str | None) -> str | None:
        if value == "":  # as a path it would be the current folder
            raise ValueError("must not be empty")
        return value

    @field_validator("attention_backend")
    @classmethod
    def _check_attention_backend(cls, value: str | None) -> str | None:
        return None if value == "auto" else value

    @field_validator("client_weights")
    @classmethod
    def _check_weights(cls, value: str) -> str:
        parse_weights(value)
        return value

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.disable_radix_cache and self.warm_prefixes is not None:
            raise ValueError("--warm-prefixes needs what --disable-radix-cache turns off")
        if self.disable_radix_cache and self.schedule_policy in CACHE_AWARE:
            raise ValueError(
                f"--schedule-policy {self.schedule_policy} orders by the prefix cache, which "
                "--disable-radix-cache turns off"
            )
        return self


def explain(error: ValidationError) -> str:
    """What is wrong first, in one line: the setting, the rule, and the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, text = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"there is no setting {name!r}"
    return f"{name}: {text}, got {first['input']!r}" if name else text  # it names what it is about


CACHE_AWARE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")


def parse_weights(text: str) -> dict[str, float]:
    """alice=4,bob=0.5 as a dict. Raises ValueError."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        client, _, number = part.rpartition("=")
        try:
            weights[client] = float(number)
        except ValueError:
            weights[client] = 0.0
        if not client or not 0 < weights[client] < float("inf"):
            raise ValueError("want NAME=WEIGHT with a positive weight, after a comma the next")
    return weights
