"""Settings, read from flags, `PENSTOCK_*` variables, a TOML file and defaults, in this order."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SkipValidation,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from penstock.app.checkpoint import asked_for
from penstock.app.errors import OperatorError, suggestion
from penstock.app.policies import policy_text, read_policy
from penstock.engine.config import GROUP_SIZES, MAX_RANKS, MAX_THREADS
from penstock.engine.cores import node_cores, num_cores
from penstock.engine.kernels.cpu import levels, prebuilt
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy

ENV_PREFIX = "PENSTOCK_"

_SECRET = frozenset({"cluster_secret"})
"""Settings whose value is never shown."""

THREADS_PER_CORE = 4
"""Threads beyond this only take turns on the cores, and each takes memory."""

# Kubernetes puts these into every container beside a service called "penstock": nobody mistyped them.
_SERVICE_LINK = re.compile(r"PENSTOCK_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")


def _split_commas(value: object) -> object:
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


_Interactive = Annotated[LanePolicy, NoDecode, SkipValidation, read_policy(Lane.INTERACTIVE)]
_Standard = Annotated[LanePolicy, NoDecode, SkipValidation, read_policy(Lane.STANDARD)]
_Batch = Annotated[LanePolicy, NoDecode, SkipValidation, read_policy(Lane.BATCH)]
_POLICY_TEXT: JsonDict = {"metavar": "KEY=N,..."}


class CommonSettings(BaseSettings):
    """The settings of everything that reads a model. A field's description is its line in a command's --help."""

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

    revision: str | None = Field(default=None, json_schema_extra={"metavar": "COMMIT|TAG|BRANCH"})
    """Revision of --model on the Hugging Face hub; without it, the newest."""

    @classmethod
    def load(cls, flags: Mapping[str, object]) -> Self:
        """Puts flags (by field name), environment, file and defaults together.

        Variables and keys of the file that mean something to a server alone are passed over elsewhere.

        Raises:
            OperatorError: with one line that names the flag, variable or key that is wrong.
        """
        _check_variables(os.environ)
        try:
            # The command line gives text, a program may give values: pydantic turns both into what the field is.
            return cls(**dict[str, Any](flags))
        except ValidationError as error:
            raise OperatorError(_first_line(error, flags)) from None

    @field_validator("model")
    @classmethod
    def _demo_model_by_its_name(cls, model: str | None) -> str | None:
        return None if model is None else asked_for(model)

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
        values = _read_toml(Path(path)) if path else {}
        known = {name: value for name, value in values.items() if name in settings_cls.model_fields}
        file = InitSettingsSource(settings_cls, known)
        return init_settings, env_settings, file


class FrontSettings(CommonSettings):
    """The settings of whatever listens: a server, and a switch in front of several."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    insecure: bool = False
    """Listen on an address that others reach though no key is asked for: whoever reaches it may use the server."""

    api_keys_file: Path | None = None
    """File with one `NAME:sha256:DIGEST` a line, as `penstock key NAME` makes them; with it, requests need a key."""

    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = ()
    """Comma-separated names that requests may be addressed to, or * for any. Without it: any, but on a loopback address
    without --api-keys-file only localhost, lest pages of other sites call this server under a name of their own."""

    served_model_name: str | None = None
    """Name that clients ask for; without it, the directory's name or the id."""

    cluster_secret: str | None = Field(default=None, min_length=16, json_schema_extra={"metavar": "SECRET"})
    """Secret by which this replica and the switches in front of it know each other, of at least 16 characters; best
    given as a variable or in the --config file, for flags can be seen by all who are on the machine."""

    drain_timeout: float = Field(default=30.0, ge=0, json_schema_extra={"metavar": "SECONDS"})
    """Seconds that running streams may go on for after SIGTERM."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important kind of line in the log."""

    log_format: Literal["plain", "json"] = "plain"
    """Lines to read, or one JSON object a line."""

    access_log: bool = False
    """A line for each request that ended: its id, status and duration; of probes only at level debug."""


class EngineSettings(CommonSettings):
    """The settings of a model at work: in a server, and in a program."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the weights are kept in; auto takes what is fastest here without a loss that shows."""

    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = None
    """Round the weights of linear maps to fewer bits as they are loaded. int8 and int4 are the fastest on a CPU; fp8,
    and nf4, which a GPU lacks, round no activations to 8 bits. With int4 and nf4, the output head
    and the first layer still have int8. The embedding keeps the type of --dtype."""

    quantize_group_size: int | None = Field(default=None, json_schema_extra={"metavar": "32|64|128"})
    """Inputs that share a scale with --quantize; without it, 32 for int4, 64 or 32 for nf4, a whole row for int8. With
    int4, 64 is quicker, and further from the weights."""

    no_quantize_cache: bool = False
    """With --quantize, quantize at every start, and keep nothing of it in the cache folder."""

    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "int8", "fp8"] = "auto"
    """Type the KV cache is kept in; auto takes that of --dtype. int8 holds nearly twice as many tokens; fp8 is
    another name for it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""

    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Processes that run the model together, each with a part of every layer: on that many GPUs, or one CPU. They have
    no drafts."""

    expert_parallel: Literal["auto", "on", "off"] = "auto"
    """How these processes share the experts of a model: on, each has some of them; off, each has some rows of every
    expert; auto takes what is better for their size."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of the model on a CPU, at most four for each core; without it, one for each."""

    numa: int | None = Field(default=None, ge=0)
    """NUMA node that the model runs on, its threads on the cores and its weights and KV cache in the memory of that
    node alone; without it, the system places them."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of one prompt and its answer; without it, what the model was made for."""

    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Most tokens computed in one step; without it, 512 on a CPU and 8192 on a GPU."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Most sequences running at the same time."""

    lane_interactive: _Interactive = Field(
        default=DEFAULT_POLICIES[Lane.INTERACTIVE], json_schema_extra=_POLICY_TEXT
    )
    """Promises and bounds of service_tier "priority": ttft and tpot in seconds, weight, max_requests, max_tokens,
    max_bytes, ttl, ageing, tenant_share, kv_share."""

    lane_standard: _Standard = Field(default=DEFAULT_POLICIES[Lane.STANDARD], json_schema_extra=_POLICY_TEXT)
    """As --lane-interactive, for service_tier "default", and for requests that name none."""

    lane_batch: _Batch = Field(default=DEFAULT_POLICIES[Lane.BATCH], json_schema_extra=_POLICY_TEXT)
    """As --lane-interactive, for service_tier "flex"."""

    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks in the pool; without it, as many as --kv-memory holds."""

    kv_memory: ByteSize | None = Field(default=None, json_schema_extra={"metavar": "SIZE"})
    """Memory for the KV cache, and for states where layers keep some, 2GiB say; without it, a share of what is free."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that may be in use once the KV cache is there, whoever uses it."""

    no_speculation: bool = False
    """Compute one token of each sequence in a step. Without it, tokens that are likely to come next are computed along
    with it where that pays; answers are the same, to the token."""

    draft: str | None = Field(default=None, json_schema_extra={"metavar": "DIR|HUB_ID|none"})
    """A small model, best of the same tokens, or a head in EAGLE-3's format, which guesses what --model says next where
    that pays, on a CPU. By default, the demo model has one, others guess by their own layer for multi-token prediction
    if their checkpoint has one, and "none" leaves it out; answers are the same, to the token."""

    draft_revision: str | None = Field(default=None, json_schema_extra={"metavar": "COMMIT|TAG|BRANCH"})
    """Revision of --draft on the Hugging Face hub; without it, the newest."""

    no_cuda_graphs: bool = False
    """On a GPU, launch every kernel of a step by itself: slower, starts sooner, takes less memory."""

    @field_validator("quantize_group_size")
    @classmethod
    def _known_group_size(cls, size: int | None) -> int | None:
        if size not in (None, *GROUP_SIZES):
            raise ValueError(f"must be {', '.join(map(str, GROUP_SIZES[:-1]))} or {GROUP_SIZES[-1]}")
        return size

    @field_validator("threads")
    @classmethod
    def _threads_for_the_cores(cls, threads: int | None) -> int | None:
        cores = num_cores()
        most = min(THREADS_PER_CORE * cores, MAX_THREADS)
        if threads is not None and threads > most:
            raise ValueError(
                f"must be at most {most}: {THREADS_PER_CORE} for each of the {cores} cores that this process may use, "
                f"and never more than {MAX_THREADS}"
            )
        return threads

    @field_validator("numa")
    @classmethod
    def _node_with_cores(cls, node: int | None) -> int | None:
        if node is not None and not node_cores(node):
            raise ValueError("must be a NUMA node that has a core which this process may use")
        return node

    @model_validator(mode="after")
    def _one_pool_size(self) -> Self:
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError("num_blocks and kv_memory both set the size of the KV cache; give one of them")
        return self

    @model_validator(mode="after")
    def _groups_of_integers(self) -> Self:
        if self.quantize_group_size is not None and self.quantize in (None, "fp8"):
            raise ValueError(
                f"quantize_group_size {self.quantize_group_size} needs quantize int8, int4 or nf4"
            )
        return self

    @property
    def lanes(self) -> dict[Lane, LanePolicy]:
        return {
            Lane.INTERACTIVE: self.lane_interactive,
            Lane.STANDARD: self.lane_standard,
            Lane.BATCH: self.lane_batch,
        }


class Settings(EngineSettings, FrontSettings):
    """Everything that an operator can set of a server."""

    tool_parser: Literal[
        "auto",
        "none",
        "cohere2",
        "functionary",
        "functools",
        "gemma4",
        "glm4",
        "glm45",
        "granite",
        "harmony",
        "hermes",
        "hunyuan",
        "hunyuan_dense",
        "lfm2",
        "llama3_json",
        "llama4_json",
        "llama_pythonic",
        "minicpm5",
        "minimax_m2",
        "mistral",
        "mistral_args",
        "nemotron",
        "olmo3",
        "phi4_mini",
        "qwen3_coder",
        "seed_oss",
    ] = "auto"
    """How the model writes that it calls a tool; auto goes by its chat template, and with none there are no tools."""

    reasoning_parser: Literal[
        "auto",
        "none",
        "cohere2",
        "cohere2_text",
        "gemma4",
        "granite_words",
        "harmony",
        "minimax_m2",
        "mistral",
        "seed_oss",
        "think",
        "think_answer",
        "think_response",
    ] = "auto"
    """How the model marks its reasoning; auto goes by its chat template, and with none it is part of the answer."""

    strict: bool = False
    """Refuse fields that could not change an answer and are not honoured; otherwise a reply's header names them."""

    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = ()
    """Comma-separated origins whose pages may call this server."""

    redis_url: str | None = Field(default=None, json_schema_extra={"metavar": "URL"})
    """Redis that keeps conversations, resumable streams and limits; without it they are kept in memory."""

    replica: str | None = None
    """Name of this process among those that share a Redis; without it, the host's name and the port."""

    warm_up_tokens: int = Field(default=16_384, ge=0)
    """Most prompt tokens that a restarted server computes ahead, those used most; with 0, Redis is told of no prompt's
    tokens. Those of requests with "store": false are never told."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for /metrics, /health and /ready alone, on the same address; then /metrics is not on --port."""

    metrics_compat: Literal["vllm"] | None = None
    """Give /metrics a second set of names, those of another server's dashboards."""

    otlp_endpoint: str | None = Field(
        default=None, pattern="^(https?://.|none$)", json_schema_extra={"metavar": "URL|none"}
    )
    """Collector that is sent a trace of each request, by OTLP over HTTP; without it, the one that
    OTEL_EXPORTER_OTLP_ENDPOINT names, if any. Needs penstock[otel]."""

    @model_validator(mode="after")
    def _a_port_for_each(self) -> Self:
        if self.metrics_port and self.metrics_port == self.port:
            raise ValueError(f"metrics_port and port are both {self.port}; give each its own")
        return self


def default_text(value: object) -> str:
    """A default as an operator would write it."""
    return policy_text(value) if isinstance(value, LanePolicy) else str(value)


def choices(name: str) -> tuple[str, ...]:
    """The words that a setting may be."""
    annotation = Settings.model_fields[name].annotation
    literals = [annotation, *get_args(annotation)]
    return next(get_args(literal) for literal in literals if get_origin(literal) is Literal)


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
        raise OperatorError(f"--config {path}: unknown key {key!r}{suggestion(key, known)}")
    return values


def _check_variables(environment: Mapping[str, str]) -> None:
    """A misspelt variable would be ignored in silence otherwise."""
    known = {(ENV_PREFIX + name).upper() for name in Settings.model_fields} | {
        levels.VARIABLE,
        prebuilt.VARIABLE,
    }
    for name in environment:
        if name.startswith(ENV_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name):
            raise OperatorError(f"unknown variable {name}{suggestion(name, known)}")


def _first_line(error: ValidationError, flags: Mapping[str, object]) -> str:
    details = error.errors(include_url=False)[0]
    message = details["msg"].removeprefix("Value error, ").partition(", unable to ")[0]
    if details["type"].startswith("byte_size"):
        message = "must be a size like 2GiB"
    if not details["loc"]:
        return message
    name = str(details["loc"][0])
    given = "" if name in _SECRET or ", not " in message else f", not {details['input']!r}"
    return f"{_origin(name, flags)}: {message[0].lower()}{message[1:]}{given}"


def _origin(name: str, flags: Mapping[str, object]) -> str:
    """The words of the operator: the flag, the variable or the key, by the same precedence as the value."""
    variable = (ENV_PREFIX + name).upper()
    if name in flags:
        return flag(name)
    if any(key.upper() == variable for key in os.environ):
        return variable
    return f"{name} in {flags.get('config') or os.environ.get(ENV_PREFIX + 'CONFIG')}"
