"""The engine's configuration. Flags, environment and file are all derived from these fields.

Runs on: any (pure).
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


def option(default, help: str, group: str, **limits):  # noqa: A002 (help is argparse's word)
    """A configuration field: default, help text, help group, and pydantic's bounds."""
    return Field(default, description=help, json_schema_extra={"group": group}, **limits)


class EngineConfig(BaseModel):
    """How to run one model. Frozen: what is measured at start lives elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = option(
        "smollm2-135m",
        "a folder with config.json and safetensors, a .gguf file, a Hugging Face id "
        "(org/name, org/name@revision), or a short name (smollm2-135m, gemma3-270m)",
        "model",
    )
    tokenizer: str | None = option(
        None, "folder or file of another tokenizer than the model's own", "model"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy: random weights (normal, 0.02), for speed tests", "model"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "type of weights and activations", "model"
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
        None, "force the provider of attention (see stoker backends)", "device"
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
    mem_fraction: float = option(
        0.9,
        "share of the free device memory that weights and KV pool may use",
        "memory",
        gt=0.0,
        le=0.98,
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
    disable_graphs: bool = option(
        False, "launch decode steps kernel by kernel (same tokens, for debugging)", "device"
    )
    disable_overlap: bool = option(
        False,
        "plan a step only when the one before has ended (same tokens, for debugging)",
        "scheduling",
    )
    seed: int = option(0, "seeds dummy weights", "model")
    check: bool = option(
        False, "verify the page ledger after every step (slow; also STOKER_CHECK=1)", "debug"
    )
    step_log: str | None = option(
        None, "write each step's size and time into this file, for stoker simulate", "debug"
    )
