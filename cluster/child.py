"""`penstock serve` or `penstock switch` as the child of this process, which it does not outlive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping

_READY = re.compile(r"ready in [\d.]+ s: open (http://[^\s\"]+)")
# Linux alone can end a process together with its parent (prctl, PR_SET_PDEATHSIG); what has to be said before is said
# by the child itself, since code between fork and exec is not safe in a process with threads.
_START = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", "penstock", *sys.argv[2:]])
"""
_KILL_S = 5.0
_NUM_LINES = 20
_MAX_LINE_BYTES = 1024 * 1024


class ChildFailed(RuntimeError):
    """The process ended; the message is the last line that it wrote."""


class Child:
    """One process, whose log becomes part of this one's."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self.url = ""
        """The address that the process listens at, once it is ready."""
        self._process = process
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, arguments: list[str], environment: Mapping[str, str]) -> Child:
        """Starts a `penstock` with these arguments and variables, and returns when it is ready.

        Raises:
            ChildFailed: it ended.
        """
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _START,
            str(os.getpid()),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
            limit=_MAX_LINE_BYTES,
        )
        child = cls(process)
        try:
            await asyncio.wait((child._ready, child._reader), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # this is cancelled
            child.kill()
            raise
        if not child._ready.done():
            await child.stop(_KILL_S)
            raise ChildFailed(child.last_line)
        return child

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def last_line(self) -> str:
        return self._lines[-1] if self._lines else "it wrote nothing"

    async def ended(self) -> int:
        """Returns the exit status when the process has ended, by itself or not."""
        # Not the process's own `wait`: if it is cancelled, others that wait may be, too.
        await asyncio.shield(self._reader)
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to end, and kills it if it has not ended after the timeout."""
        self.ask_to_end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.ended()
                return
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await self.ended()

    def ask_to_end(self) -> None:
        """Asks the process to take no new requests, and to end when its streams have."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self) -> None:
        """Reads what the process writes, until the process ends."""
        assert self._process.stderr is not None
        while True:
            try:
                raw = await self._process.stderr.readline()
            except ValueError:  # the line is too long, and was thrown away
                continue
            if not raw:
                return
            self._note(raw.decode(errors="replace").rstrip())

    def _note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if line:
            self._lines.append(line.removeprefix("penstock: "))
        if (ready := _READY.search(line)) and not self._ready.done():
            self.url = ready[1]
            self._ready.set_result(None)
