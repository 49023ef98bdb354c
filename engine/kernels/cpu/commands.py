"""Commands that run side by side, as many at a time as there are cores; one that several want runs once."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path

from penstock.engine.cores import num_cores


class Commands:
    """Threads that run commands. They are daemons: a program that ends does not wait for them.

    Temporary files go to a folder, and messages are in English.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self._variables = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, ...], _Run] = {}
        self._num_threads = 0

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for run in self._runs.values():
                run.stop()
            for _thread in range(self._num_threads):
                self._queue.put(None)

    def run(self, commands: Iterable[Iterable[str]]) -> None:
        """Runs commands that do not depend on each other, and waits for them.

        Commands that still run when one fails, or when the wait is interrupted, are stopped if no other caller wants
        them.

        Raises:
            OSError: a command cannot be started.
            subprocess.SubprocessError: a command failed, and says so in `stderr`, or took too long.
        """
        with self._lock:
            runs = [self._wanted(tuple(command)) for command in commands]
        try:
            for future in wait([run.future for run in runs], return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            with self._lock:
                for run in runs:
                    self._leave(run)

    def _wanted(self, command: tuple[str, ...]) -> _Run:
        if command not in self._runs:
            self._runs[command] = _Run(command)
            self._queue.put(self._runs[command])
            if self._num_threads < num_cores():
                self._num_threads += 1
                threading.Thread(target=self._work, daemon=True).start()
        self._runs[command].num_waiting += 1
        return self._runs[command]

    def _leave(self, run: _Run) -> None:
        run.num_waiting -= 1
        if run.num_waiting == 0 and not run.future.done():
            del self._runs[run.command]
            run.stop()

    def _work(self) -> None:
        while (run := self._queue.get()) is not None:
            if run.future.set_running_or_notify_cancel():
                try:
                    run.execute(self._variables, self._timeout_s)
                    run.future.set_result(None)
                except (OSError, subprocess.SubprocessError) as error:
                    run.future.set_exception(error)


class _Run:
    """One command, which has a process group of its own: a compiler's children are stopped with it."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.command = command
        self.num_waiting = 0
        self.future: Future[None] = Future()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def execute(self, variables: Mapping[str, str], timeout_s: float) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._process = process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=variables,
                process_group=0,
            )
        try:
            _, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            process.communicate()
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self.command, stderr=stderr)

    def stop(self) -> None:
        self.future.cancel()
        with self._lock:
            self._is_stopped = True
            if self._process is not None and self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
