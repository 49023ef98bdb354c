"""Settings: one class, read from flags, `PENSTOCK_*` variables, a TOML file and defaults, in this order."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.errors import OperatorError

ENV_PREFIX = "PENSTOCK_"

# Kubernetes puts these into every container beside a service called "penstock": nobody mistyped them.
_SERVICE_LINK = re.compile(r"PENSTOCK_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")


def _split_commas(value: object) -> object:
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


class Settings(BaseSettings):
    """Everything an operator can set. A field's description is its line in `penstock serve --help`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    config: Path | None = None
    """TOML file with any of these settings."""

    model: str | None = Field(default=None, json_schema_extra={"metavar": "DIR|HUB_ID"})
    """Checkpoint to serve: a directory or a Hugging Face id; without it, the demo model."""

    served_model_name: str | None = None
    """Name that clients ask for; without it, the directory's name or the id."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    api_keys_file: Path | None = None
    """File with one `name:key` or `key` a line; with it, requests need one of the keys."""

    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = ()
    """Comma-separated origins whose pages may call this server."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the weights are kept in; auto takes what is fastest here without a loss that shows."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of the model on a CPU; without it, one a core."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of one prompt and its answer; without it, what the model was made for."""

    max_batch_tokens: int = Field(default=512, ge=1)
    """Most tokens computed in one step."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Most sequences running at the same time."""

    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks in the pool; without it, as many as --kv-memory holds."""

    kv_memory: ByteSize | None = Field(default=None, json_schema_extra={"metavar": "SIZE"})
    """Memory for the KV cache, 2GiB say; without it, a share of what is free."""

    drain_timeout: float = Field(default=30.0, ge=0, json_schema_extra={"metavar": "SECONDS"})
    """Seconds that running streams may go on for after SIGTERM."""

    metrics_compat: Literal["vllm"] | None = None
    """Give /metrics a second set of names, those of another server's dashboards."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important kind of line in the log."""

    @model_validator(mode="after")
    def _one_pool_size(self) -> Settings:
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError("num_blocks and kv_memory both set the size of the KV cache; give one of them")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file: the first that has a setting gives it."""
        path = init_settings().get("config") or env_settings().get("config")
        file = InitSettingsSource(settings_cls, _read_toml(Path(path)) if path else {})
        return init_settings, env_settings, file


def load_settings(flags: Mapping[str, str]) -> Settings:
    """Puts flags (by field name), environment, file and defaults together.

    Raises:
        OperatorError: with one line that names the flag, variable or key that is wrong.
    """
    _check_variables(os.environ)
    try:
        # Only text comes from the command line; pydantic turns it into what the field is.
        return Settings(**dict[str, Any](flags))
    except ValidationError as error:
        raise OperatorError(_first_line(error, flags)) from None


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OperatorError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"--config {path}: not TOML: {error}") from None
    known = set(Settings.model_fields) - {"config"}
    for key in values.keys() - known:
        raise OperatorError(f"--config {path}: unknown key {key!r}{_suggestion(key, known)}")
    return values


def _check_variables(environment: Mapping[str, str]) -> None:
    """A misspelt variable would be ignored in silence otherwise."""
    known = {(ENV_PREFIX + name).upper() for name in Settings.model_fields}
    for name in environment:
        if name.startswith(ENV_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name):
            raise OperatorError(f"unknown variable {name}{_suggestion(name, known)}")


def _suggestion(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _first_line(error: ValidationError, flags: Mapping[str, str]) -> str:
    details = error.errors(include_url=False)[0]
    message = details["msg"].removeprefix("Value error, ")
    if not details["loc"]:
        return message
    name = str(details["loc"][0])
    return f"{_origin(name, flags)}: {message[0].lower()}{message[1:]}, not {details['input']!r}"


def _origin(name: str, flags: Mapping[str, str]) -> str:
    """What the operator wrote: the flag, the variable or the key, by the same precedence as the value."""
    variable = (ENV_PREFIX + name).upper()
    if name in flags:
        return flag(name)
    if any(key.upper() == variable for key in os.environ):
        return variable
    return f"{name} in {flags.get('config') or os.environ.get(ENV_PREFIX + 'CONFIG')}"
