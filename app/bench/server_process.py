"""`penstock serve` as a real process, for measuring it and for testing it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

_READY = re.compile(r" ready: http://([\w.:\[\]-]+):(\d+)$")


class ServerFailed(RuntimeError):
    """The server ended before it was ready; the message is what it wrote."""


class ServerProcess:
    """A server on a free port; entering waits until it is ready, leaving stops it.

    The server's last line of starting up names its address, so that nothing has to be guessed or polled.
    """

    def __init__(self, arguments: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.lines: list[str] = []
        self.host = ""
        self.port = 0
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """
        Raises:
            ServerFailed: it ended, or took too long.
        """
        self._ready.wait(timeout_s)
        if not self.port:
            self.stop()
            raise ServerFailed(self.log)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Asks the server to end, and makes it end if it does not; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def __enter__(self) -> ServerProcess:
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = _READY.search(line.rstrip())
            if found:
                self.host, self.port = found[1], int(found[2])
                self._ready.set()
        self._ready.set()
