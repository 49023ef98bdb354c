"""A real Redis in the test's hands: it can be stopped, paused, and come back with nothing in it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import redis

from tests import tools

START_S = 20.0


class RedisServer:
    """One redis-server on a unix socket in a folder of its own. It is started by `with`, and ends with it.

    `url` stays the same whatever becomes of the process, so that who is connected can come back.
    """

    def __init__(self, *options: str, persistent: bool = False) -> None:
        """`options` go to redis-server as they are; if it is `persistent`, `start` finds what `stop` left."""
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._options = options
        self._persistent = persistent
        self._process: subprocess.Popen[str] | None = None
        self.url = f"unix://{self._folder}/socket"
        self.log: list[str] = []

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Returns when it answers."""
        assert self._process is None, "Redis runs already"
        path = tools.find("redis-server")
        persistence = ("--appendonly", "yes") if self._persistent else ("--appendonly", "no")
        place = ("--port", "0", "--unixsocket", f"{self._folder}/socket", "--dir", str(self._folder))
        self._process = subprocess.Popen(
            [path, *place, "--save", "", *persistence, *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout, ready), daemon=True).start()
        assert ready.wait(START_S), "".join(self.log)
        assert self.call("PING") == b"PONG"

    def _read(self, output: IO[str], ready: threading.Event) -> None:
        with output:
            for line in output:
                self.log.append(line)
                if "ready to accept connections" in line.lower():
                    ready.set()

    def stop(self) -> None:
        """As by its operator: it writes what it has to write, and connections are closed."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As by kill -9; it may be paused, or gone already."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def _end(self, sign: signal.Signals) -> None:
        assert self._process is not None, "Redis does not run"
        self._process.send_signal(sign)
        self._process.wait(START_S)
        self._process = None

    def pause(self) -> None:
        """It takes connections, and answers nothing."""
        assert self._process is not None, "Redis does not run"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None, "Redis does not run"
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """It comes back with nothing in it, unless it is persistent."""
        self.stop()
        self.start()

    def call(self, *command: str | bytes | int | float) -> Any:
        """Returns Redis' answer, as bytes; for a test to look behind the store."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def all_keys(self) -> set[str]:
        return {key.decode() for key in self.call("KEYS", "*")}
