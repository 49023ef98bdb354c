"""Python processes forked from one that has imported what a server needs, which takes a CPU some seconds each time."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from penstock.app.bench.server_process import SERVE, ServerProcess, environment

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "penstock.app.server"])


def run(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs `penstock` with these arguments to its end.

    Raises:
        subprocess.TimeoutExpired: it was killed after that time.
    """
    command = ["penstock", *arguments]
    with TemporaryDirectory() as folder:
        outputs = {1: Path(folder) / "stdout", 2: Path(folder) / "stderr"}
        process = _FORKS.Process(target=_become, args=(command, outputs, dict(environment), str(Path.cwd())))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s)
        texts = [path.read_text(encoding="utf-8") for path in outputs.values()]
    return subprocess.CompletedProcess(command, process.exitcode, *texts)


class ForkedProcess:
    """Acts as `subprocess.Popen([sys.executable, "-m", *command], start_new_session=True)`, as far as it is used here.

    The script that uses it must do nothing when it is imported. CUDA is not initialised in the process that forks.
    """

    def __init__(
        self, command: Sequence[str], output: int, environment: Mapping[str, str], folder: Path
    ) -> None:
        """`output`: 1 or 2, the stream that `pipe` reads; the other one is this process's."""
        reader, writer = _FORKS.Pipe(duplex=False)
        with reader, writer:
            self._process = _FORKS.Process(
                target=_become, args=(list(command), {output: writer}, dict(environment), str(folder))
            )
            self._process.start()
            self.pipe = os.fdopen(os.dup(reader.fileno()))
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired"""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _become(
    command: list[str], outputs: Mapping[int, Connection | Path], environment: dict[str, str], folder: str
) -> None:
    """Runs `python -m command` in the process that was just forked; `outputs` are where 1 and 2 go."""
    for number, output in outputs.items():
        with output.open("w") if isinstance(output, Path) else output as target:
            os.dup2(target.fileno(), number)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = command[1:]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


class ForkedServer(ServerProcess):
    """Starts in a fraction of the time, for tests that start many."""

    def _start(self, command: list[str]) -> tuple[subprocess.Popen[str], IO[str]]:
        process = ForkedProcess(command[len(SERVE) - 2 :], 2, environment(), Path.cwd())
        return cast(subprocess.Popen[str], process), process.pipe
