"""`penstock serve` as a real process, for measuring it and for testing it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

SERVE = (sys.executable, "-m", "penstock", "serve")


def samples(url: str) -> list[Sample]:
    """All samples of a server's `/metrics`."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


class ServerFailed(RuntimeError):
    """The server ended, or took too long; the message is what it wrote."""


class ServerProcess:
    """A server on a free port; entering waits until it is ready, leaving stops it.

    The lines that it writes say where it listens and when it is ready, so that nothing is guessed or polled.
    """

    def __init__(self, arguments: Sequence[str] = (), command: Sequence[str] = SERVE) -> None:
        self.process, self._stderr = self._start([*command, "--port", "0", *arguments])
        self.lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens; known before it is ready."""
        return self.wait_line(" starting on http").split()[-1]

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def wait_ready(self) -> None:
        self.wait_line(" ready in ")

    def wait_line(self, part: str, timeout_s: float = 120.0) -> str:
        """The first line with `part` in it, as soon as it was written.

        Raises:
            ServerFailed: the server ended without it, or took too long.
        """
        with self._news:
            self._news.wait_for(lambda: self._ended or self._find(part) is not None, timeout_s)
            line = self._find(part)
        if line is None:
            self.kill()
            raise ServerFailed(self.log)
        return line

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit status; a server that does not end in time is killed, which is none that it would choose."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        self._reader.join()
        self._stderr.close()
        return status

    def stop(self) -> int:
        """Asks the server to end; its exit status."""
        if self.process.poll() is None:
            self.signal()
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def __enter__(self) -> ServerProcess:
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, command: list[str]) -> tuple[subprocess.Popen[str], IO[str]]:
        """The process, and its stderr."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
        )
        assert process.stderr is not None
        return process, process.stderr

    def _find(self, part: str) -> str | None:
        return next((line for line in self.lines if part in line), None)

    def _read(self) -> None:
        for line in self._stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def environment() -> dict[str, str]:
    """The variables of a server."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
