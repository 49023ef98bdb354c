"""The wiring between step thread and event loop, and what `build` makes of a folder and its settings."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from penstock.app.build import Outbox, build, load_options
from penstock.app.errors import OperatorError
from penstock.app.settings import Settings
from penstock.engine.engine import EngineState
from penstock.engine.planning.report import StepReport
from penstock.gateway.access.keys import Client, digest_of
from penstock.priority.lanes import Tenant

KEY = "alice-0123456789abcdef"


def reports(count: int) -> list[StepReport]:
    """Told apart by identity alone: an outbox does not look into what it carries."""
    return [StepReport.__new__(StepReport) for _ in range(count)]


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def settle(received: list[object], count: int) -> None:
    """Turns of the loop until so much has come; a bound, so that what never comes is a failure and no hang."""
    for _ in range(10_000):
        if len(received) >= count:
            return
        await asyncio.sleep(0)


def test_reports_come_in_order_and_on_the_loop_s_thread() -> None:
    sent, received, threads = reports(200), list[object](), set[int]()

    def note(*reports: StepReport) -> None:
        received.extend(reports)
        threads.add(threading.get_ident())

    async def run() -> None:
        outbox = Outbox()
        outbox.open(asyncio.get_running_loop(), note, received.append)

        def work() -> None:
            for report in sent:
                outbox.deliver(report)

        in_a_thread(work)
        assert received == [], "delivering does not wait for whoever reads"
        await settle(received, len(sent))
        assert threads == {threading.get_ident()}

    asyncio.run(run())
    assert [id(report) for report in received] == [id(report) for report in sent]


def test_what_comes_while_the_loop_is_busy_comes_in_one_call() -> None:
    first, second, third = reports(3)
    calls = list[object]()

    async def run() -> None:
        outbox = Outbox()
        outbox.open(asyncio.get_running_loop(), lambda *reports: calls.append(reports), calls.append)
        in_a_thread(lambda: outbox.deliver(first))
        in_a_thread(lambda: outbox.deliver(second))
        await settle(calls, 1)
        in_a_thread(lambda: outbox.deliver(third))
        await settle(calls, 2)

    asyncio.run(run())
    assert calls == [(first, second), (third,)]


def test_states_keep_their_place_among_the_reports() -> None:
    """The failure of the engine is delivered after the last tokens that it brought, never before."""
    (report,), received = reports(1), list[object]()

    async def run() -> None:
        outbox = Outbox()
        outbox.open(asyncio.get_running_loop(), lambda *reports: received.extend(reports), received.append)

        def work() -> None:
            outbox.announce(EngineState.READY)
            outbox.deliver(report)
            outbox.announce(EngineState.FAILED)

        in_a_thread(work)
        await settle(received, 3)

    asyncio.run(run())
    assert received == [EngineState.READY, report, EngineState.FAILED]


def test_what_is_said_before_opening_or_after_closing_is_dropped() -> None:
    received = list[object]()

    async def run() -> None:
        outbox = Outbox()
        before, between, after = reports(3)
        in_a_thread(lambda: outbox.deliver(before))
        outbox.open(asyncio.get_running_loop(), lambda *reports: received.extend(reports), received.append)
        in_a_thread(lambda: outbox.deliver(between))
        outbox.close()
        in_a_thread(lambda: outbox.deliver(after))
        in_a_thread(lambda: outbox.announce(EngineState.STOPPED))
        await settle(received, 2)
        assert received == [between]

    asyncio.run(run())


def test_a_closed_outbox_outlives_its_loop() -> None:
    """The step thread may still be in its last step when the loop is gone."""

    async def run() -> Outbox:
        outbox = Outbox()
        outbox.open(asyncio.get_running_loop(), lambda *_: None, lambda _: None)
        outbox.close()
        return outbox

    outbox = asyncio.run(run())
    (report,) = reports(1)
    outbox.deliver(report)
    outbox.announce(EngineState.STOPPED)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(LLAMA_TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_nothing_is_started_by_building(tiny_model: Path) -> None:
    before = set(threading.enumerate())
    parts = build(Settings(model=str(tiny_model)))
    assert parts.folder == tiny_model
    assert parts.engine.state is EngineState.STARTING
    assert set(threading.enumerate()) <= before


def test_the_model_is_served_under_the_name_that_was_set(tiny_model: Path) -> None:
    assert build(Settings(model=str(tiny_model))).service.options.models == ("llama-tiny",)
    named = build(Settings(model=str(tiny_model), served_model_name="ours"))
    assert named.service.options.models == ("ours",)


def test_what_the_checkpoint_recommends_is_the_default(model: Path) -> None:
    plain = build(Settings(model=str(model))).service.options.defaults
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    recommended = build(Settings(model=str(model))).service.options.defaults
    assert (recommended.temperature, recommended.top_k) == (0.25, 7)
    assert recommended.top_p == plain.top_p


def test_a_checkpoint_without_recommendations_has_openai_s(model: Path) -> None:
    (model / "generation_config.json").unlink()
    defaults = build(Settings(model=str(model))).service.options.defaults
    assert (defaults.temperature, defaults.top_p) == (1.0, 1.0)


def test_keys_reach_the_door(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:sha256:{digest_of(KEY).hex()} top=interactive\n")
    options = build(Settings(model=str(tiny_model), api_keys_file=path)).service.options
    assert dict(options.clients) == {digest_of(KEY): Client(Tenant(name="alice"))}
    assert dict(build(Settings(model=str(tiny_model))).service.options.clients) == {}


def test_traces_need_a_collector_and_their_package(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.gateway.tracing", None)  # as if its package were not there
    assert build(Settings(model=str(tiny_model))).traces is None
    hint = r" needs OpenTelemetry: pip install 'penstock\[otel\]'"
    with pytest.raises(OperatorError, match=f"^--otlp-endpoint{hint}"):
        build(Settings(model=str(tiny_model), otlp_endpoint="http://collector:4318"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    with pytest.raises(OperatorError, match=f"^OTEL_EXPORTER_OTLP_ENDPOINT{hint}"):
        build(Settings(model=str(tiny_model)))
    assert build(Settings(model=str(tiny_model), otlp_endpoint="none")).traces is None


def test_every_setting_of_the_engine_reaches_it() -> None:
    options = load_options(
        Settings(
            device="cpu",
            dtype="bfloat16",
            threads=3,
            max_num_seqs=5,
            max_batch_tokens=7,
            max_model_len=11,
            num_blocks=13,
        )
    )
    assert (options.device, options.dtype, options.num_threads) == ("cpu", "bfloat16", 3)
    assert (options.max_num_seqs, options.max_batch_tokens, options.max_model_len) == (5, 7, 11)
    assert (options.num_blocks, options.kv_bytes) == (13, None)
    assert load_options(Settings(quantize="int8", no_quantize_cache=True)).keep_quantized is False
    left_open = load_options(Settings())
    assert left_open.keep_quantized
    assert [left_open.for_device(kind).max_batch_tokens for kind in ("cpu", "cuda")] == [512, 8192]
    assert options.for_device("cuda").max_batch_tokens == 7
    assert load_options(Settings.model_validate({"kv_memory": "1MiB"})).kv_bytes == 1 << 20
    assert (options.gpu_memory_utilization, options.cuda_graphs) == (0.9, True)
    of_gpu = load_options(Settings(gpu_memory_utilization=0.5, no_cuda_graphs=True))
    assert (of_gpu.gpu_memory_utilization, of_gpu.cuda_graphs) == (0.5, False)
