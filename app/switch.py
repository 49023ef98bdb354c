"""`penstock switch`: one address in front of several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.app.build import allowed_hosts, identity
from penstock.app.checkpoint import find_checkpoint, fingerprint, model_name
from penstock.app.errors import OperatorError
from penstock.app.keys import KeyFile
from penstock.app.listen import bind, certificate_of, check_exposure, is_loopback, url
from penstock.app.log import configure_log, log
from penstock.app.loop import Server, loop_factory, settle_garbage, uvicorn_config
from penstock.app.model import make_prompts
from penstock.app.settings import FrontSettings
from penstock.cluster.members import Members, parse_address
from penstock.cluster.switch import Switch, SwitchOptions
from penstock.cluster.upstream import Address
from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.engine.planning.embedding import read_embedding
from penstock.gateway.background import meanwhile
from penstock.priority.routing.router import Router

_LOOK_AGAIN_S = 0.25


class ReplicasFile:
    """A file with the address of a replica on each line; blank lines and those with a # in front are passed over.

    Put a new one in place in one go (`mv`), so that no half of it is read.
    """

    def __init__(self, named: Sequence[str], path: Path | None) -> None:
        """`named` are replicas in addition to those of the file, if there is one."""
        self._named = list(named)
        self._path = path
        self._read_last = ""

    def read(self) -> list[Address]:
        """
        Raises:
            OperatorError: the file cannot be read, or an address is none.
        """
        self._read_last = self._text()
        lines = [line.strip() for line in self._read_last.splitlines()]
        try:
            return [
                parse_address(line) for line in [*self._named, *lines] if line and not line.startswith("#")
            ]
        except ValueError as error:
            raise OperatorError(str(error)) from None

    def _text(self) -> str:
        if self._path is None:
            return ""
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise OperatorError(f"--replicas-file {self._path}: {reason}") from None

    async def watch(self, members: Members) -> None:
        """Tells of the replicas whenever they changed, until cancelled; a broken file changes nothing."""
        while self._path is not None:
            await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                if self._text() != self._read_last:
                    await members.set(self.read())
            except OperatorError as error:
                log.warning("%s; the replicas that were read before stay", error)


def run(named: Sequence[str], replicas_file: Path | None, settings: FrontSettings) -> int:
    """Serves until a signal; the exit status.

    Raises:
        OperatorError: an address, a path, or the secret is wrong.
    """
    replicas = ReplicasFile(named, replicas_file)
    addresses = replicas.read()
    configure_log(settings.log_level, settings.log_format, access=settings.access_log)
    started_s, certificate = time.monotonic(), certificate_of(settings)
    keys = KeyFile(settings.api_keys_file) if settings.api_keys_file else None

    async def serve(listener: socket.socket) -> None:
        switch = make_switch(settings, keys, is_open=not is_loopback(listener))
        config = uvicorn_config(
            switch.app(), lifespan="off", proxies=settings.forwarded_allow_ips, **certificate
        )
        server = Server(config)
        _drain_at_signals(switch, server, settings.drain_timeout)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(switch.running(addresses))
            await stack.enter_async_context(meanwhile(replicas.watch(switch.members)))
            if keys is not None:
                await stack.enter_async_context(meanwhile(keys.watch(switch.access.replace)))
            settle_garbage()
            log.info("ready in %.1f s: open %s", time.monotonic() - started_s, url(listener, settings))
            await server.serve(sockets=[listener])

    with bind(settings.host, settings.port) as listener:
        check_exposure(listener, settings)
        log.info("starting on %s", url(listener, settings))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(listener))
    return 0


def make_switch(
    settings: FrontSettings, keys: KeyFile | None, *, is_open: bool, router: Router | None = None
) -> Switch:
    """A switch for replicas of these settings; `router` if another one than usual chooses.

    Raises:
        OperatorError: the checkpoint, the file of keys or the secret is wrong.
    """
    if settings.cluster_secret is None:
        raise OperatorError(
            "a switch and its replicas need the same PENSTOCK_CLUSTER_SECRET, of at least 16 characters"
        )
    folder = find_checkpoint(settings.model, settings.revision)
    try:
        prompts, pooling = make_prompts(folder, read_tokenizer(folder)), read_embedding(folder, 0).pooling
    except CheckpointError as error:
        raise OperatorError(str(error)) from None
    options = SwitchOptions(
        secret=settings.cluster_secret,
        identity=identity(model_name(settings.model, settings.served_model_name), fingerprint(folder)),
        block_size=LoadOptions().block_size,
        pooling=pooling,
        clients=keys.read() if keys else {},
        allowed_hosts=allowed_hosts(settings, is_open),
        overload_status=int(settings.overload_status),
    )
    return Switch(options, prompts, router)


def _drain_at_signals(switch: Switch, server: Server, timeout_s: float) -> None:
    """At the first signal new requests are refused and those in progress continue; at the second it ends at once."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        switch.draining = True
        with contextlib.suppress(asyncio.CancelledError):
            await switch.drained(timeout_s)
        server.should_exit = True

    def on_signal() -> None:
        if draining:
            draining[0].cancel()
        else:
            draining.append(loop.create_task(drain()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
