"""Settings, read from flags, `PENSTOCK_*` variables, a TOML file and defaults, in this order."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_network
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    IPvAnyNetwork,
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
from penstock.app.parsers import ReasoningParser, ToolParser
from penstock.app.policies import policy_text, read_policy
from penstock.engine.config import GROUP_SIZES, MAX_RANKS, MAX_THREADS
from penstock.engine.cores import node_cores, num_cores
from penstock.engine.kernels.cpu import levels, prebuilt
from penstock.engine.text.watermark import DELTA, GAMMA
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


_Networks = Annotated[tuple[IPvAnyNetwork, ...], NoDecode, BeforeValidator(_split_commas)]
_LOOPBACK = ip_network("127.0.0.1"), ip_network("::1")
_Interactive = Annotated[LanePolicy, NoDecode, SkipValidation, read_policy(Lane.INTERACTIVE)]
_Standard = Annotated[LanePolicy, NoDecode, SkipValidation, read_policy(Lane.STANDARD)]
_Batch = Annotated[LanePolicy, NoDecode, SkipValidation, read_policy(Lane.BATCH)]
_POLICY_TEXT: JsonDict = {"metavar": "KEY=N,..."}


class CommonSettings(BaseSettings):
    """The settings of every command that reads a model. A field's docstring is its line in the command's --help."""

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
    """Checkpoint to serve: a directory or a Hugging Face id; by default, the demo model."""

    revision: str | None = Field(default=None, json_schema_extra={"metavar": "COMMIT|TAG|BRANCH"})
    """Revision of --model on the Hugging Face hub; by default, the newest."""

    @classmethod
    def load(cls, flags: Mapping[str, object]) -> Self:
        """Combines flags (by field name), environment, file and defaults.

        Variables and keys that only a server uses are ignored elsewhere.

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
        """Returns flags, environment and file in order of precedence."""
        path = init_settings().get("config") or env_settings().get("config")
        values = _read_toml(Path(path)) if path else {}
        known = {name: value for name, value in values.items() if name in settings_cls.model_fields}
        file = InitSettingsSource(settings_cls, known)
        return init_settings, env_settings, file


class FrontSettings(CommonSettings):
    """The settings of a process that listens: a server, or a switch in front of several."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""

    ssl_certfile: Path | None = None
    """PEM file with a certificate, followed by those that lead to its authority: the server then speaks HTTPS alone."""

    ssl_keyfile: Path | None = None
    """PEM file with the private key of --ssl-certfile, without a password; by default, it is in that file."""

    insecure: bool = False
    """Listen on an address that others can reach without requiring a key: anyone who reaches it may use the server."""

    api_keys_file: Path | None = None
    """File with one `NAME:sha256:DIGEST` per line, as printed by `penstock key NAME`; with it, requests need a key."""

    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = ()
    """Comma-separated host names that requests may be addressed to, or * for any. By default any, except on a loopback
    address without --api-keys-file: there only localhost, so that a page of another site cannot call this server by
    pointing a name of its own at it. Probes of /health, /ready and /metrics may use any name."""

    forwarded_allow_ips: _Networks = _LOOPBACK
    """Comma-separated addresses or networks of proxies whose X-Forwarded-For the access log believes."""

    overload_status: Literal["503", "429"] = "503"
    """HTTP status of requests that are refused because the server has no room for them. With 503, a proxy that ejects
    servers which answer 5xx ejects a healthy one under load; 429 is then the better answer."""

    served_model_name: str | None = None
    """Model name that clients use; by default, the directory's name or the id."""

    cluster_secret: str | None = Field(default=None, min_length=16, json_schema_extra={"metavar": "SECRET"})
    """Secret of at least 16 characters that this replica shares with the switches in front of it. Set it as a variable
    or in the --config file: every user of the machine can see flags."""

    drain_timeout: float = Field(default=30.0, ge=0, json_schema_extra={"metavar": "SECONDS"})
    """Seconds that running streams may continue after SIGTERM."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    log_format: Literal["plain", "json"] = "plain"
    """Plain lines for people, or one JSON object per line."""

    access_log: bool = False
    """Log a line for each finished request: its id, status, duration, tenant, lane and tokens. Probes are logged
    at level debug only."""


class EngineSettings(CommonSettings):
    """The settings of a running model, in a server or in a program."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory; auto picks the fastest on this machine that loses no visible quality."""

    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = None
    """Round the weights of linear maps to fewer bits while loading. int8 and int4 are the fastest on a CPU. fp8 and nf4
    (not on a GPU) do not round activations to 8 bits. With int4 and nf4 the output head and the first layer keep int8;
    the embedding keeps --dtype."""

    quantize_group_size: int | None = Field(default=None, json_schema_extra={"metavar": "32|64|128"})
    """Inputs that share a scale with --quantize; by default 32 for int4, 64 or 32 for nf4, a whole row for int8.
    With int4, 64 is faster and less accurate."""

    no_quantize_cache: bool = False
    """With --quantize, quantize at every start instead of keeping the result in the cache folder."""

    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "int8", "fp8", "int4"] = "auto"
    """Type of the KV cache; auto follows --dtype. int8 holds nearly twice as many tokens as 16 bits; fp8 means the
    same. int4 holds 3.5 times as many, and costs more accuracy."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""

    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of processes that run the model together, each with a part of every layer: on as many GPUs, or on one CPU.
    They do not use drafts."""

    pipeline_parallel: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Number of stages that the model's layers are cut into, each with some of them and as many processes as
    --tensor-parallel says. They do not use drafts."""

    expert_parallel: Literal["auto", "on", "off"] = "auto"
    """How the processes of --tensor-parallel divide a model's experts: on gives each some whole experts, off some rows
    of every expert; auto chooses by the experts' size."""

    data_parallel_attention: bool = False
    """With --tensor-parallel and a model with experts: each process has some whole experts and all other weights, and
    serves sequences of its own, whose keys and values it alone has."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of the model on a CPU, at most four per core; by default, one per core."""

    numa: int | None = Field(default=None, ge=0)
    """NUMA node to run the model on: its threads on that node's cores, its weights and KV cache in that node's memory.
    By default the system places them."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt and its answer together; by default, the model's own context length."""

    kv_keep: int = Field(default=0, ge=0)
    """Tokens of a longer prompt and answer whose keys and values are kept: the first 16 and the latest ones, so that it
    may be longer than the KV cache has room for. What lies between is dropped, and no later token sees it. 0 keeps all;
    a request may have its own `kv_keep`."""

    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Most tokens computed in one step; by default, 512 on a CPU and 8192 on a GPU."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Most sequences running at the same time."""

    lane_interactive: _Interactive = Field(
        default=DEFAULT_POLICIES[Lane.INTERACTIVE], json_schema_extra=_POLICY_TEXT
    )
    """Promises and bounds of service_tier "priority": ttft and tpot in seconds, weight, max_requests, max_tokens,
    max_bytes, ttl, ageing, tenant_share, kv_share."""

    lane_standard: _Standard = Field(default=DEFAULT_POLICIES[Lane.STANDARD], json_schema_extra=_POLICY_TEXT)
    """Like --lane-interactive, for service_tier "default", and for requests that name none and are not streamed or
    would miss the interactive promise."""

    lane_batch: _Batch = Field(default=DEFAULT_POLICIES[Lane.BATCH], json_schema_extra=_POLICY_TEXT)
    """Like --lane-interactive, for service_tier "flex"."""

    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks in the pool; by default, as many as --kv-memory holds."""

    kv_memory: ByteSize | None = Field(default=None, json_schema_extra={"metavar": "SIZE"})
    """Memory for the KV cache, and for the states of layers that keep one, such as 2GiB; by default, a share of the
    free memory."""

    kv_host_bytes: ByteSize = Field(default=ByteSize(0), json_schema_extra={"metavar": "SIZE"})
    """Host memory for KV blocks that the KV cache has no room for any more, such as 16GiB. They are read back while a
    request that needs them waits. Meant for GPUs: on a CPU, --kv-memory is the better use of the same memory."""

    kv_disk: Path | None = Field(default=None, json_schema_extra={"metavar": "DIR"})
    """Directory for KV blocks that the KV cache has no room for any more; a restarted server finds them again. Several
    servers may share it. It holds what was in prompts and answers: nobody else should be able to read or write it."""

    kv_disk_bytes: ByteSize = Field(default=ByteSize(10 << 30), json_schema_extra={"metavar": "SIZE"})
    """Most bytes of all files in --kv-disk; those that were used longest ago are deleted."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that may be in use once the KV cache is allocated, other programs included."""

    no_speculation: bool = False
    """Compute one token of each sequence per step. By default, likely next tokens are computed in the same step where
    that is faster; the answers are the same, token for token."""

    draft: str | None = Field(default=None, json_schema_extra={"metavar": "DIR|HUB_ID|none"})
    """Small model, preferably with the same tokens, or EAGLE-3 head that guesses the next tokens of --model
    where that is faster. By default the demo model uses its own head, and others their layer for multi-token
    prediction if the checkpoint has one; "none" uses neither. The answers are the same, token for token."""

    draft_revision: str | None = Field(default=None, json_schema_extra={"metavar": "COMMIT|TAG|BRANCH"})
    """Revision of --draft on the Hugging Face hub; by default, the newest."""

    no_cuda_graphs: bool = False
    """On a GPU, launch every kernel of a step separately: slower, but starts sooner and takes less memory."""

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
    """All settings of a server."""

    tool_parser: ToolParser = "auto"
    """Format in which the model writes tool calls; auto follows its chat template, none turns tools off."""

    reasoning_parser: ReasoningParser = "auto"
    """Format in which the model marks its reasoning; auto follows its chat template, none leaves it in the answer."""

    strict: bool = False
    """Refuse requests with fields that are not honoured and could not change an answer; by default such fields are
    ignored, and a header of the reply names them."""

    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)] = ()
    """Comma-separated origins whose pages may call this server from a browser."""

    redis_url: str | None = Field(default=None, json_schema_extra={"metavar": "URL"})
    """Redis that keeps conversations, resumable streams and limits; by default they are kept in memory."""

    replica: str | None = None
    """Name of this process among those that share a Redis; by default, the host's name and the port."""

    role: Literal["both", "prefill", "decode"] = "both"
    """Part of requests that this replica is for behind a switch: long prompts, whose KV others take from it; all other
    tokens; or both. While there is nobody for the other part, it serves all of a request."""

    warm_up_tokens: int = Field(default=16_384, ge=0)
    """Most prompt tokens that a restarted server computes in advance, the most used first; with 0, no prompt's tokens
    are written to Redis. Those of requests with "store": false never are."""

    watermark_key_file: Path | None = None
    """File with a secret of at least 16 bytes, random ones: answers to requests with "watermark": true then have
    a watermark, which `penstock watermark` finds with the same file."""

    watermark_gamma: float = Field(default=GAMMA, gt=0, lt=1)
    """Share of the tokens that a watermark prefers at each place; to find one takes the same share."""

    watermark_delta: float = Field(default=DELTA, gt=0, le=100)
    """What the logits of these tokens get more. With more, a watermark is found in shorter texts, which read worse."""

    watermark_all: bool = False
    """Give the watermark to all texts, whatever requests ask for."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Separate port for /metrics, /health and /ready, on the same address; /metrics is then not served on --port."""

    grpc_port: int = Field(default=0, ge=0, le=65535)
    """Port for gRPC, on the same address; with 0 there is none. Needs penstock[grpc]."""

    health: Literal["live", "ready"] = "live"
    """What /health says: whether this process need not be started again, or what /ready says, for platforms that send
    requests wherever /health is 200."""

    metrics_compat: Literal["vllm"] | None = None
    """Add the metric names of another server to /metrics, so that its dashboards work."""

    otlp_endpoint: str | None = Field(
        default=None, pattern="^(https?://.|none$)", json_schema_extra={"metavar": "URL|none"}
    )
    """Collector that receives a trace of each request, by OTLP over HTTP; by default, the one that
    OTEL_EXPORTER_OTLP_ENDPOINT names, if any. Needs penstock[otel]."""

    @model_validator(mode="after")
    def _a_port_for_each(self) -> Self:
        ports = {"port": self.port, "metrics_port": self.metrics_port, "grpc_port": self.grpc_port}
        for (one, port), (other, same) in combinations(ports.items(), 2):
            if port and port == same:
                raise ValueError(f"{other} and {one} are both {port}; give each its own")
        return self

    @model_validator(mode="after")
    def _a_key_for_all(self) -> Self:
        if self.watermark_all and self.watermark_key_file is None:
            raise ValueError("watermark_all needs watermark_key_file")
        return self


def default_text(value: object) -> str:
    """Returns a default as an operator would write it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, ByteSize):
        return value.human_readable() if value else "0"
    return policy_text(value) if isinstance(value, LanePolicy) else str(value)


def choices(name: str) -> tuple[str, ...]:
    """Returns the values that a setting may have."""
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
    """Raises OperatorError for a misspelt variable, which would otherwise be ignored silently."""
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
    """Returns where the operator set a value, the flag, the variable or the key, by the precedence of values."""
    variable = (ENV_PREFIX + name).upper()
    if name in flags:
        return flag(name)
    if any(key.upper() == variable for key in os.environ):
        return variable
    return f"{name} in {flags.get('config') or os.environ.get(ENV_PREFIX + 'CONFIG')}"
