"""A Redis of one's own, and a slow line to it, for measuring and testing what a server does when it is in trouble."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from penstock.app.errors import OperatorError

SCHEME = "unix://"


def find_redis() -> str:
    """Where redis-server is; raises OperatorError if there is none."""
    path = shutil.which("redis-server")
    if path is None:
        raise OperatorError("the part store needs redis-server, which is not on the PATH")
    return path


class RedisProcess:
    """One redis-server on a unix socket in a folder of its own, with nothing in it; leaving ends it."""

    def __init__(self) -> None:
        """Raises OperatorError if there is no redis-server."""
        path = find_redis()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-redis-"))
        self.url = f"{SCHEME}{self._folder}/socket"
        place = ["--port", "0", "--unixsocket", f"{self._folder}/socket", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [path, *place, "--save", "", "--appendonly", "no"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> RedisProcess:
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if "ready to accept connections" in line.lower():
                return self
        self.__exit__(None, None, None)
        raise OperatorError(f"redis-server did not start: {' '.join(lines[-3:])}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """It takes connections, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """From now on connections are refused."""
        self._process.kill()
        self._process.wait()
        Path(self.url.removeprefix(SCHEME)).unlink(missing_ok=True)


class SlowLine:
    """A way to a Redis on which every answer takes `delay_s` longer; that can be changed at any time."""

    def __init__(self, url: str, delay_s: float = 0.0) -> None:
        """`url` is that of a unix socket."""
        self.delay_s = delay_s
        self._target = url.removeprefix(SCHEME)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-line-"))
        self.url = f"{SCHEME}{self._folder}/socket"
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> SlowLine:
        self._thread.start()
        listening = asyncio.start_unix_server(self._take, self.url.removeprefix(SCHEME))
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _close(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._loop.create_task(self._carry(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways, until one of the ends is gone."""
        try:
            from_redis, to_redis = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        ways = [
            self._loop.create_task(_copy(reader, to_redis)),
            self._loop.create_task(self._delay(from_redis, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            to_redis.close()

    async def _delay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()


_PIECE = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
