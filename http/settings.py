"""The server's configuration: flags over STOKER_* variables over --config FILE over defaults.

One model, `ServerConfig`, is the source of the flags, of their help and of their checks. It adds
the server's fields to the engine's, so one object starts both.

Runs on: any (pure).
"""

import argparse
import difflib
import importlib.metadata
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ..engine.api.config import EngineConfig, option
from ..engine.api.errors import StartError
from ..engine.text.formats import REASONING_PARSERS, TOOL_PARSERS

ENV_PREFIX = "STOKER_"
SECRETS = ("api_key", "admin_key")
HTTP_URL = re.compile(r"https?://[^\s/?#]")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\sA-Z\[\]/?#@:,*]+)(:\d{1,5})?")
NO_FIELDS = ("STOKER_CACHE", "STOKER_XPU_GRAPHS")  # variables that are read where they are needed

Texts = Annotated[tuple[str, ...], NoDecode]  # a repeated flag; a,b,c in the environment
if typing.TYPE_CHECKING:
    ToolParser: typing.TypeAlias = str
    ReasoningParser: typing.TypeAlias = str
else:  # the names are those of the tables
    ToolParser, ReasoningParser = Literal[TOOL_PARSERS], Literal[REASONING_PARSERS]


def version() -> str:
    """The installed version; 0 where the checkout runs uninstalled."""
    try:
        return importlib.metadata.version("stoker")
    except importlib.metadata.PackageNotFoundError:
        return "0"


class ServerConfig(EngineConfig, BaseSettings):
    """How to serve one model over HTTP. Frozen."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), env_prefix=ENV_PREFIX
    )

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface", "http")
    port: int = option(8000, "port to listen on; 0 takes a free one", "http", ge=0, le=65535)
    uds: Path | None = option(None, "Unix socket to listen on, instead of host and port", "http")
    ssl_certfile: Path | None = option(None, "certificate chain (PEM): serve over TLS", "http")
    ssl_keyfile: Path | None = option(
        None, "its private key, where the certificate's file has none", "http"
    )
    served_model_name: Texts = option(
        (), "name that clients use (repeatable: aliases); the model's own by default", "http"
    )
    max_body_bytes: int = option(32 << 20, "largest request body", "http", ge=1024)
    body_timeout_s: float = option(60, "time a client has to send its body", "http", gt=0)
    cors_origin: Texts = option(
        (), "origin whose web pages may call the server (repeatable, * for all)", "http"
    )
    tool_call_parser: ToolParser = option(
        "auto", "how the model writes tool calls; auto goes by its chat template", "chat"
    )
    reasoning_parser: ReasoningParser = option(
        "auto", "how the model writes reasoning; auto goes by its chat template", "chat"
    )
    trust_request_chat_template: bool = option(
        False, "requests may bring a chat template of their own (chat_template)", "chat"
    )
    api_key: Texts = option(
        (), "key that clients must send as a bearer token (repeatable)", "access"
    )
    api_key_file: Path | None = option(None, "file with one API key a line", "access")
    admin_key: str | None = option(
        None, "key of the admin routes (/flush_cache, abort_all)", "access"
    )
    rate_limit: int | None = option(
        None, "requests a minute that an API key may make; more get 429", "access", ge=1
    )
    isolate_cache_per_key: bool = option(
        False, "clients with different API keys share no cached prefixes", "access"
    )
    request_timeout_s: float | None = option(
        None, "longest time a request may take; none by default", "limits", gt=0
    )
    drain_timeout: float = option(
        30, "seconds that running requests have to finish after SIGTERM", "limits", ge=0
    )
    keep_alive_s: float = option(
        15, "an idle stream gets a comment this often, so that no proxy cuts it", "limits", gt=0
    )
    max_tokens_behind: int = option(
        4096, "a client whose reading is this many tokens behind is cut off", "limits", ge=1
    )
    stall_timeout_s: float = option(
        60, "time a client has to read the end of its answer", "limits", gt=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe messages to log", "log"
    )
    log_format: Literal["text", "json"] = option("text", "one line or one JSON object each", "log")
    access_log: bool = option(False, "log a line for each HTTP request", "log")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector, as http://127.0.0.1:4318, that gets a span a request", "log"
    )
    log_prompts: bool = option(False, "log every prompt, and how it is sampled", "log")

    @field_validator("served_model_name", "cors_origin", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @field_validator("cors_origin")
    @classmethod
    def _are_origins(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not ORIGIN.fullmatch(value):
                raise ValueError("want * or an origin as browsers send it, scheme://host[:port]")
        return values

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not HTTP_URL.match(value):
            raise ValueError("want http:// or https:// and a host")
        return value

    @field_validator("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("api_key", "admin_key")
    @classmethod
    def _no_empty_key(cls, value: Any) -> Any:
        keys = (value,) if isinstance(value, str) else value or ()
        if not all(map(str.strip, keys)):  # it would leave open what it is to lock
            raise ValueError("a key is empty")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # load_config reads the others, so that only it depends on them

    def keys(self) -> tuple[str, ...]:
        """All API keys, those of the key file included. Raises StartError."""
        keys = self.api_key
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise StartError(f"--api-key-file {self.api_key_file}: {error}") from None
            keys += tuple(filter(None, map(str.strip, lines)))
            if keys == self.api_key:
                raise StartError(f"--api-key-file {self.api_key_file} holds no key")
        for flag, value, what in (
            ("--rate-limit", self.rate_limit, "counts"),
            ("--isolate-cache-per-key", self.isolate_cache_per_key, "separates"),
        ):
            if value and not keys:
                raise StartError(f"{flag} {what} by API key: it needs --api-key")
        return keys

    def public(self) -> dict[str, Any]:
        """The configuration as JSON values, without the secrets."""
        values = self.model_dump(mode="json")
        return values | {name: "redacted" for name in SECRETS if values[name]}


def load_config(
    flags: dict[str, Any], file: Path | None = None, defaults: Mapping[str, Any] | None = None
) -> ServerConfig:
    """Merge the sources into one configuration.

    Args:
        flags: what the command line gave.
        file: YAML or TOML, by its suffix.
        defaults: where a command has others.

    Raises:
        StartError: one line that names the field.
    """
    values = dict(defaults or {}) | (_read(file) if file else {})
    over = EnvSettingsSource(ServerConfig)() | flags
    try:
        return ServerConfig(**values | over)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        field = str(first["loc"][0]) if first["loc"] else ""
        hint = where = ""
        if str(first["input"]).startswith("tcp://"):
            hint = f" (Kubernetes sets {ENV_PREFIX}{name.upper()}: use enableServiceLinks: false)"
        if field in flags:
            name = name if field == "model" else f"--{name.replace('_', '-')}"
        elif field in over:
            name = f"{ENV_PREFIX}{name.upper()}"
        elif field:
            where = f"--config {file}: "
        text = first["msg"].removeprefix("Value error, ")
        if field:  # else it is about several settings, which it names
            text = f"{name}: {text}"
            if not field.startswith(SECRETS):
                text += f", got {first['input']!r}"
        raise StartError(f"{where}{text}{hint}") from None


def _read(file: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".toml": tomllib.loads,
    }
    if file.suffix not in readers:
        raise StartError(f"--config {file}: want a .yaml or .toml file")
    if not file.is_file():
        raise StartError(f"--config {file}: no such file")
    try:
        values = readers[file.suffix](file.read_text())
    except Exception as error:  # each format's reader has its own
        raise StartError(f"--config {file}: {' '.join(str(error).split())}") from None
    if values is None:  # an empty YAML file
        return {}
    if not isinstance(values, dict):
        raise StartError(f"--config {file}: want settings by name, got a {type(values).__name__}")
    for name in values:
        if name not in ServerConfig.model_fields:
            near = difflib.get_close_matches(str(name), ServerConfig.model_fields, 1)
            hint = f" (nearest: {near[0]})" if near else ""
            raise StartError(f"--config {file}: there is no setting {name!r}{hint}")
    return values


LOG_LEVELS = typing.get_args(ServerConfig.model_fields["log_level"].annotation)


def add_flags(parser: argparse.ArgumentParser, config: type[EngineConfig] = ServerConfig) -> None:
    """One flag a field of `config`, grouped, with the field's help. Values stay text for pydantic.

    `model` is a positional argument.
    """
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_help(config, "model")
    )
    parser.add_argument("--config", type=Path, help="YAML or TOML file with these settings")
    groups: dict[str, Any] = {}
    for name, info in config.model_fields.items():
        if name == "model":
            continue
        extra = typing.cast("dict[str, str]", info.json_schema_extra)
        if extra["group"] not in groups:
            groups[extra["group"]] = parser.add_argument_group(extra["group"])
        details: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(config, name)}
        kind, choices = _kind(info.annotation)
        if kind is bool:
            details["action"] = argparse.BooleanOptionalAction
        elif kind is tuple:
            details |= {"action": "append", "metavar": "TEXT"}
        elif choices:
            details["choices"] = choices
        else:
            details["metavar"] = kind.__name__.upper().replace("STR", "TEXT")
        groups[extra["group"]].add_argument("--" + name.replace("_", "-"), **details)


def given_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gave."""
    names = ServerConfig.model_fields
    return {name: value for name, value in vars(namespace).items() if name in names}


def unknown_variables() -> list[str]:
    """STOKER_* variables that nothing reads: most likely misspelt."""
    fields = {ENV_PREFIX + name.upper() for name in ServerConfig.model_fields}
    names = (v for v in os.environ if v.startswith(ENV_PREFIX) and v not in NO_FIELDS)
    return sorted(name for name in names if name.upper() not in fields)


def _help(config: type[EngineConfig], name: str) -> str:
    info = config.model_fields[name]
    text = (info.description or "").replace("%", "%%")
    shown = info.default not in (None, (), False)
    return f"{text} (default: {info.default})" if shown else text


def _kind(annotation: Any) -> tuple[type, Sequence[str]]:
    """The plain type behind an annotation, and its choices where it is a Literal."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):  # Literal | None: Union
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Literal:
        return str, typing.get_args(annotation)
    return typing.get_origin(annotation) or annotation, ()
