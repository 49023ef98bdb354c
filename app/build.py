"""The wiring: from settings to an app that serves and an engine that computes. No torch here: see `_make_runner`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from penstock.app.checkpoint import created, find_draft, fingerprint, model_name, num_bytes
from penstock.app.errors import OperatorError
from penstock.app.keys import KeyFile, weights_of
from penstock.app.log import Progress, log, progress_bar
from penstock.app.model import Model, read_model
from penstock.app.settings import EngineSettings, FrontSettings, Settings
from penstock.app.store import make_store
from penstock.app.watermark import read_watermark
from penstock.engine.config import MAX_DRAFTS, LoadOptions, ModelConfig
from penstock.engine.cores import num_nodes, stay_on_node
from penstock.engine.engine import Engine, EngineState
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.engine.model.drafts import DraftSource, check_draft, shared_tokens
from penstock.engine.model.eagle import check_eagle, is_eagle, read_eagle
from penstock.engine.planning.device import Runner
from penstock.engine.planning.rehearsal import Rehearsal
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import NO_LIMIT
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.grammars import Grammars
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.text.watermark import Watermark
from penstock.engine.tiers.opening import TierOptions
from penstock.gateway.app import create_app
from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.endpoints.state import SECRET_HEADER
from penstock.gateway.http.hosts import LOOPBACK_HOSTS
from penstock.gateway.kv import EngineExchange
from penstock.gateway.service import Service, ServiceOptions
from penstock.gateway.wire.sampling import KeepLimits
from penstock.priority.lanes import Lane
from penstock.priority.queue import LaneQueue
from penstock.priority.routing.state import Role
from penstock.priority.steptime import StepTimeModel

if TYPE_CHECKING:
    from penstock.engine.kernels.ranks import World
    from penstock.gateway.tracing import Traces

PAGE = Path(__file__).parent.parent / "static"

_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own, which its exporter reads."""


@dataclass(frozen=True, slots=True)
class Core:
    """A model and the engine that computes it, put together and not yet started."""

    engine: Engine
    queue: LaneQueue
    sink: TextSink
    grammars: Grammars
    model: Model
    keep: KeepLimits


@dataclass(frozen=True, slots=True)
class ServerParts:
    """A server, put together and not yet started."""

    app: ASGIApp
    service: Service
    intake: Intake
    queue: LaneQueue
    engine: Engine
    outbox: Outbox
    keys: KeyFile | None
    traces: Traces | None
    folder: Path
    """The checkpoint's folder."""


class Outbox:
    """Carries the step thread's reports to the event loop, in one call per step.

    While the loop has no time to be called, reports gather, and come in one call.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_reports: Callable[..., None]
        self._on_state: Callable[[EngineState], None]
        self._reports: deque[StepReport] = deque()
        self._is_called = False
        """Whether a call of the loop is scheduled."""

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_reports: Callable[..., None],
        on_state: Callable[[EngineState], None],
    ) -> None:
        """
        Args:
            on_reports: is called with one report or more.
        """
        self._on_reports, self._on_state = on_reports, on_state
        self._loop = loop

    def close(self) -> None:
        """Drops all further reports."""
        self._loop = None

    def deliver(self, report: StepReport) -> None:
        if (loop := self._loop) is not None:
            self._reports.append(report)
            if not self._is_called:
                self._is_called = True
                loop.call_soon_threadsafe(self._hand_over)

    def announce(self, state: EngineState) -> None:
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(self._on_state, state)

    def _hand_over(self) -> None:
        self._is_called = False  # before looking: who comes later calls again
        if reports := [self._reports.popleft() for _ in range(len(self._reports))]:
            self._on_reports(*reports)


def build(settings: Settings, replica: str = "local", *, is_open: bool = False) -> ServerParts:
    """Reads the small files (config, tokenizer, keys) and puts everything together.

    Args:
        replica: this process's name among those that share a Redis.
        is_open: it can be reached by other names than this machine's own.

    Raises:
        OperatorError: a path, a checkpoint or a file of keys is wrong.
    """
    keys = KeyFile(settings.api_keys_file) if settings.api_keys_file else None
    clients = keys.read() if keys else {}
    outbox, lanes = Outbox(), settings.lanes
    core = build_core(settings, outbox.deliver, outbox.announce, weights_of(clients.values()))
    read = core.model
    folder, weights = read.folder, fingerprint(read.folder)
    model = model_name(settings.model, settings.served_model_name)
    watermark = _watermark(settings)
    service_options = ServiceOptions(
        models=(model,),
        created=created(folder),
        num_bytes=num_bytes(folder),
        block_size=load_options(settings).block_size,
        vocab_size=read.config.vocab_size,
        eos_token_ids=read.config.eos_token_ids,
        embedding=read.embedding,
        defaults=read.defaults,
        clients=clients,
        promises={lane: policy.ttft_s for lane, policy in lanes.items() if isfinite(policy.ttft_s)},
        overload_status=int(settings.overload_status),
        cors_origins=settings.cors_origins,
        allowed_hosts=allowed_hosts(settings, is_open),
        health_is_ready=settings.health == "ready",
        metrics_compat=settings.metrics_compat,
        metrics_elsewhere=settings.metrics_port is not None,
        replica=replica,
        identity=identity(model, weights),
        system_fingerprint=system_fingerprint(settings, weights, watermark),
        policies=lanes,
        cluster_secret=settings.cluster_secret,
        role=Role(settings.role),
        warm_up_tokens=settings.warm_up_tokens,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        strict=settings.strict,
        watermark=watermark,
        watermarks_all=settings.watermark_all,
        keep=core.keep,
    )
    store = make_store(settings.redis_url, f"{model}:{weights}", replica)
    traces = _make_traces(settings.otlp_endpoint, model, replica)
    service = Service(
        core.engine,
        core.queue,
        read.prompts,
        service_options,
        sink=core.sink,
        store=store,
        grammars=core.grammars,
        traces=traces,
        kv=None if settings.cluster_secret is None else EngineExchange(core.engine),
    )
    intake = Intake(service)
    app = create_app(service, PAGE, intake)
    return ServerParts(app, service, intake, core.queue, core.engine, outbox, keys, traces, folder)


def build_core(
    settings: EngineSettings,
    deliver: Callable[[StepReport], None],
    announce: Callable[[EngineState], None],
    weights: Mapping[str, int] | None = None,
    show: Progress = progress_bar,
) -> Core:
    """Reads config and tokenizer, and puts together what computes.

    Args:
        deliver: is told what each step brought, on the step thread.
        announce: is told each new state, there too.
        weights: of tenants.
        show: how the progress of loading is shown.

    Raises:
        OperatorError: a path or a checkpoint is wrong.
    """
    read = read_model(settings)
    folder, config, tokenizer = read.folder, read.config, read.tokenizer
    if not config.eos_token_ids:
        log.warning(
            "%s names no end of a text (eos_token_id in config.json or generation_config.json, eos_token in "
            "tokenizer_config.json): answers end at max_tokens or a stop string; the model's generation_config.json "
            "would mend it",
            folder,
        )
    options = load_options(settings)
    keep = _keep_limits(settings, config, options.block_size)
    draft = _find_draft(settings, config, tokenizer)
    step_times = StepTimeModel(chosen_share=config.spec.chosen_share)
    promises = any(isfinite(policy.ttft_s) for policy in settings.lanes.values())
    queue = LaneQueue(threading.Lock(), settings.lanes, weights=weights, model=step_times)
    sink = TextSink(tokenizer, config.eos_token_ids)
    grammars = Grammars(tokenizer, config.eos_token_ids)
    engine = Engine(
        lambda: _make_runner(folder, options, draft, show, settings.numa),
        queue,
        sink,
        _limits(settings, config),
        deliver=deliver,
        clock=time.monotonic,
        on_state=announce,
        grammars=grammars,
        rehearsal=Rehearsal(queue, min(config.vocab_size, tokenizer.vocab_size)) if promises else None,
        tiers=tier_options(settings, folder),
    )
    return Core(engine, queue, sink, grammars, read, keep)


def identity(model: str, weights: str) -> str:
    """Replicas that can stand in for each other have the same; `weights` is the checkpoint's fingerprint."""
    return f"{model} {weights}, penstock {version('penstock')}"


def system_fingerprint(settings: EngineSettings, weights: str, watermark: Watermark | None = None) -> str:
    """Returns the `system_fingerprint` of weights, types and version: equal ones give equal texts.

    Args:
        weights: the checkpoint's fingerprint.
        watermark: the server's, whose strength counts; its key does not, so that no reply tells of it.
    """
    types = (settings.dtype, settings.quantize, settings.quantize_group_size, settings.kv_dtype)
    made_by = (
        *types,
        settings.device,
        settings.tensor_parallel,
        settings.pipeline_parallel,
        settings.expert_parallel,
        settings.data_parallel_attention,
        version("penstock"),
        *(() if watermark is None else (watermark.gamma, watermark.delta)),
        *((settings.kv_keep,) if settings.kv_keep else ()),
    )
    digest = blake2b(repr((weights, made_by)).encode(), digest_size=5)
    return f"fp_{digest.hexdigest()}"


def tier_options(settings: EngineSettings, folder: Path) -> TierOptions | None:
    """Returns the tiers that are asked for; None if none are, and then no weights are read.

    Other servers are one, where there is a cluster's secret.
    """
    secret = settings.cluster_secret if isinstance(settings, FrontSettings) else None
    if not settings.kv_host_bytes and settings.kv_disk is None and secret is None:
        return None
    rounded = settings.dtype, settings.quantize, settings.quantize_group_size
    return TierOptions(
        weights=f"{fingerprint(folder)} {rounded}",
        host_bytes=settings.kv_host_bytes,
        disk=settings.kv_disk,
        disk_bytes=settings.kv_disk_bytes,
        peer_headers=None if secret is None else {SECRET_HEADER: secret},
    )


def allowed_hosts(settings: FrontSettings, is_open: bool) -> tuple[str, ...]:
    """Without keys, what guards a server on a loopback address is that nobody else can reach it; a page could."""
    if settings.allowed_hosts or is_open or settings.api_keys_file is not None:
        return settings.allowed_hosts
    return (*LOOPBACK_HOSTS, settings.host)


def _watermark(settings: Settings) -> Watermark | None:
    """Raises OperatorError for a file of a key that cannot be read, or has none."""
    if settings.watermark_key_file is None:
        return None
    watermark = read_watermark(
        settings.watermark_key_file, settings.watermark_gamma, settings.watermark_delta
    )
    whose = "all texts have" if settings.watermark_all else "texts that ask for it have"
    log.info("%s a watermark, gamma %g, delta %g", whose, watermark.gamma, watermark.delta)
    return watermark


def _find_draft(settings: EngineSettings, config: ModelConfig, tokenizer: Tokenizer) -> DraftSource | None:
    """The draft model's checkpoint; None without one.

    Raises:
        OperatorError: there is no such checkpoint, or its model cannot draft for the one that is served.
    """
    if option := _several(settings):
        if settings.draft not in (None, "none"):
            raise OperatorError(f"--draft {settings.draft}: with {option} there are no drafts")
        return None
    folder = (
        None
        if settings.no_speculation
        else find_draft(settings.draft, settings.draft_revision, settings.model)
    )
    if folder is None:
        return None
    try:
        if is_eagle(folder):
            check_eagle(config, read_eagle(folder))
            return DraftSource(folder)
        check_draft(config, read_config(folder), settings.max_model_len or config.max_position)
        return DraftSource(folder, shared_tokens(tokenizer, read_tokenizer(folder)))
    except CheckpointError as error:
        raise OperatorError(f"--draft {settings.draft or folder}: {error}") from None


def _several(settings: EngineSettings) -> str:
    """The option that has several processes run the model; empty without one."""
    if settings.tensor_parallel > 1:
        return "--tensor-parallel"
    return "--pipeline-parallel" if settings.pipeline_parallel > 1 else ""


def load_options(settings: EngineSettings) -> LoadOptions:
    return LoadOptions(
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        quantize_group_size=settings.quantize_group_size,
        keep_quantized=not settings.no_quantize_cache,
        kv_dtype=settings.kv_dtype,
        num_threads=settings.threads,
        max_num_seqs=settings.max_num_seqs,
        max_batch_tokens=settings.max_batch_tokens or 0,
        max_model_len=settings.max_model_len,
        kv_keep=settings.kv_keep,
        num_blocks=settings.num_blocks,
        kv_bytes=settings.kv_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cuda_graphs=not settings.no_cuda_graphs,
        max_drafts=0 if settings.no_speculation or _several(settings) else MAX_DRAFTS,
        own_drafts=settings.draft != "none",
        num_ranks=settings.tensor_parallel,
        num_stages=settings.pipeline_parallel,
        expert_parallel=settings.expert_parallel,
        data_parallel_attention=settings.data_parallel_attention,
    )


def _keep_limits(settings: EngineSettings, config: ModelConfig, block_size: int) -> KeepLimits:
    """Raises OperatorError if so much cannot be kept."""
    keep = KeepLimits(
        default=settings.kv_keep,
        most=settings.max_model_len or config.max_position,
        window=config.longest_window,
        sees_chunks=config.sees_chunks,
        block_size=block_size,
    )
    if mistake := keep.mistake(settings.kv_keep):
        raise OperatorError(f"--kv-keep {settings.kv_keep} {mistake}")
    return keep


def _limits(settings: EngineSettings, config: ModelConfig) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_tokens=settings.max_batch_tokens or NO_LIMIT,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len or config.max_position,
        kv_shares=tuple(settings.lanes[lane].kv_share for lane in Lane),
    )


def _make_traces(endpoint: str | None, model: str, replica: str) -> Traces | None:
    """Imports OpenTelemetry only where there is a collector.

    Raises:
        OperatorError: it is not installed.
    """
    source = "--otlp-endpoint" if endpoint else next(filter(os.environ.get, _OTLP_VARIABLES), None)
    if source is None or endpoint == "none":
        return None
    try:
        from penstock.gateway.tracing import Traces
    except ImportError as error:
        raise OperatorError(f"{source} needs OpenTelemetry: pip install 'penstock[otel]' ({error})") from None
    log.info("a trace of each request goes to %s (%s)", endpoint or os.environ[source], source)
    return Traces(endpoint, model, replica, time.monotonic)


def _place(numa: int | None, options: LoadOptions) -> None:
    """Keeps what this thread loads, and the threads that it starts, on their NUMA node."""
    if numa is not None:
        stay_on_node(numa)
    elif options.device != "cuda" and (num := num_nodes()) > 1:
        log.info("the cores are those of %d NUMA nodes; with --numa, a model and its memory stay on one", num)


def _make_runner(
    folder: Path, options: LoadOptions, draft: DraftSource | None, show: Progress, numa: int | None = None
) -> Runner:
    """Called on the step thread: importing torch takes seconds, and belongs there, and so do threads that stay on a
    node."""
    _place(numa, options)
    log.info("loading torch")
    from penstock.app.estimate import card_table
    from penstock.engine.execution.loaded import LoadedModel
    from penstock.engine.execution.loader import load_model
    from penstock.engine.execution.runner import ModelRunner

    def load(world: World | None = None) -> LoadedModel:
        log.info("loading %s", folder)
        title = "loading the weights" if options.quantize is None else "quantizing the weights"
        with show(title) as update:
            model = load_model(
                folder, options, log.info, lambda done, total: update(done / max(1, total)), draft, world
            )
        for line in card_table(model.memory) if model.memory.card else ():
            log.info("%s", line)
        return model

    @contextmanager
    def graphs() -> Iterator[Callable[[int, int], None]]:
        with show("capturing CUDA graphs") as update:
            yield lambda done, total: update(done / max(1, total))

    if options.num_processes == 1:
        return ModelRunner(load, progress=graphs)
    from penstock.engine.parallel.leader import make_runner, start_ranks

    return make_runner(
        folder,
        options,
        start=lambda: start_ranks(options, log.info),
        make_runner=lambda world: ModelRunner(partial(load, world), progress=graphs),
    )
