"""The process: one event loop that serves, one step thread that computes, and how both come up and go down.

Up: listen, then read config and tokenizer, then serve (`/ready` says 503) while the step thread loads and warms up.
Down, at the first SIGTERM or SIGINT: new work is refused, running streams go on for up to the drain time, what is left
is ended with an error frame. At the second: at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import NoReturn

from penstock.app.build import ServerParts, build
from penstock.app.errors import load_error
from penstock.app.keys import weights_of
from penstock.app.listen import Certificate, bind, certificate_of, check_exposure, is_loopback, port_of, url
from penstock.app.log import configure_log, log
from penstock.app.loop import Server, delay_garbage, loop_factory, settle_garbage, uvicorn_config
from penstock.app.promises import promises, remember
from penstock.app.rpc import RpcPort
from penstock.app.settings import Settings
from penstock.engine.engine import EngineState
from penstock.gateway.access.keys import Client
from penstock.gateway.app import create_metrics_app
from penstock.gateway.background import meanwhile

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STEP_THREAD_S = 5.0


def serve(settings: Settings) -> int:
    """Serves until a signal or a fault; the exit status."""
    for number in _SIGNALS:  # until the event loop takes them over, nothing runs that would have to be ended
        signal.signal(number, _exit_at_once)
    configure_log(settings.log_level, settings.log_format, access=settings.access_log)
    started_s = time.monotonic()
    delay_garbage()
    certificate = certificate_of(settings)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(bind(settings.host, settings.port))
        check_exposure(listener, settings)
        log.info("starting on %s", url(listener, settings))
        metrics_listener = None
        if settings.metrics_port is not None:
            metrics_listener = sockets.enter_context(
                bind(settings.host, settings.metrics_port, "--metrics-port")
            )
            log.info("metrics on %s", url(metrics_listener, settings))
        rpc_port = RpcPort(settings) if settings.grpc_port else None
        if rpc_port is not None:
            log.info("gRPC on %s", rpc_port.address)
        replica = settings.replica or f"{socket.gethostname()}:{port_of(listener)}"
        parts = build(settings, replica, is_open=not is_loopback(listener))
        if settings.redis_url is not None:
            log.info("conversations, streams and quotas are kept in Redis")
        process = _Process(settings, certificate, parts, listener, metrics_listener, rpc_port, started_s)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            ended = runner.run(process.run())
        return process.finish(ended)


def _exit_at_once(*_: object) -> NoReturn:
    raise SystemExit(0)


def _settle_interpreter() -> None:
    """Once the model is loaded."""
    settle_garbage()
    # The step thread plans in Python, and lets go between two steps for less than another thread may need to wake up.
    # So the event loop gets its turn by asking for it, which it may do when it has waited so long.
    sys.setswitchinterval(0.0001)


class _Process:
    """Everything between the first line of the log and the exit status."""

    def __init__(
        self,
        settings: Settings,
        certificate: Certificate,
        parts: ServerParts,
        listener: socket.socket,
        metrics_listener: socket.socket | None,
        rpc_port: RpcPort | None,
        started_s: float,
    ) -> None:
        self.settings = settings
        self.certificate = certificate
        self.parts = parts
        self.listener = listener
        self.metrics_listener = metrics_listener
        self.rpc_port = rpc_port
        self.started_s = started_s
        self.was_ready = False
        self.server = Server(uvicorn_config(parts.app, proxies=settings.forwarded_allow_ips, **certificate))
        # That a model cannot be loaded is told once, by `finish`.
        logging.getLogger("penstock.engine").addFilter(lambda _: self.was_ready)
        self._drain: asyncio.Task[bool] | None = None

    async def run(self) -> bool:
        """Serves until it has to end; returns whether the step thread ended as well."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        self.parts.outbox.open(loop, self.parts.service.deliver, self._on_state)
        async with self._watching_keys(), self._serving_metrics(), self._serving_rpc():
            self.parts.engine.start()
            await self.server.serve(sockets=[self.listener])
        # A load cannot be interrupted, and a step that hangs must not keep the process.
        ended = await asyncio.to_thread(self.parts.engine.stop, _STEP_THREAD_S if self.was_ready else 0.0)
        self.parts.outbox.close()
        if self.parts.traces is not None:
            await asyncio.to_thread(self.parts.traces.close)
        return ended

    @contextlib.asynccontextmanager
    async def _watching_keys(self) -> AsyncIterator[None]:
        if self.parts.keys is None:
            yield
            return
        async with meanwhile(self.parts.keys.watch(self._take_keys)):
            yield

    @contextlib.asynccontextmanager
    async def _serving_metrics(self) -> AsyncIterator[None]:
        """On a port of its own, to the end of the drain."""
        if self.metrics_listener is None:
            yield
            return
        app = create_metrics_app(self.parts.service)
        server = Server(uvicorn_config(app, lifespan="off", **self.certificate))
        task = asyncio.create_task(server.serve(sockets=[self.metrics_listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await task

    def _serving_rpc(self) -> AbstractAsyncContextManager[None]:
        if self.rpc_port is None:
            return contextlib.nullcontext()
        return self.rpc_port.serving(self.parts.service, self.parts.intake)

    def _take_keys(self, clients: dict[bytes, Client]) -> None:
        self.parts.service.access.replace(clients)
        self.parts.queue.set_weights(weights_of(clients.values()))

    def finish(self, ended: bool) -> int:
        """The exit status; does not return if the step thread did not end.

        Raises:
            OperatorError: the model could not be loaded.
        """
        status = self._status()
        log.info("stopped")
        if not ended:
            # A thread inside torch does not survive the interpreter's own shutdown: leave without one.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status

    def _status(self) -> int:
        failure = self.parts.engine.failure
        if failure is None:
            return 0
        if self.was_ready:
            return 1
        raise load_error(failure, self.parts.folder)

    def _on_state(self, state: EngineState) -> None:
        """The step thread came to a new state; this runs on the event loop."""
        if state is EngineState.READY:
            self.was_ready = True
            if self._drain is None:  # else it is on its way out, and its socket may be closed
                self._open()
        elif state is EngineState.FAILED:
            self.server.should_exit = True

    def _open(self) -> None:
        _settle_interpreter()
        self.parts.service.warm_up()
        said = list(promises(self.parts.queue.admission, self.parts.engine.max_sequence_tokens))
        for promise in said:
            log.info("promised, %s", promise)
        if said:
            remember(self.parts.folder, self.settings, said)
        log.info(
            "ready in %.1f s: open %s", time.monotonic() - self.started_s, url(self.listener, self.settings)
        )

    def _on_signal(self) -> None:
        if self._drain is not None:
            log.warning("a second signal: ending at once")
            self._drain.cancel()
            return
        timeout_s = self.settings.drain_timeout
        log.info("draining: running streams may go on for %g s; once more ends them at once", timeout_s)
        self.parts.service.begin_drain()
        self._drain = asyncio.get_running_loop().create_task(self.parts.service.dispatch.drained(timeout_s))
        self._drain.add_done_callback(self._end)  # also of a task that is cancelled before it runs

    def _end(self, _: asyncio.Task[bool]) -> None:
        self.parts.service.dispatch.fail_all()
        self.server.should_exit = True
