"""Processes that are forked: they have the arguments, variables, folder and outputs that they were given."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from loadtests.forked import ForkedProcess, run

SAYS = (
    "import os, sys; print(os.getcwd(), sorted(os.environ.items()), os.getsid(0) == os.getpid(), file=sys.{})"
)
STANDS = "import signal; print('stands', flush=True); signal.pause()"
VARIABLES = {"A": "1", "B": "2"}


@pytest.mark.parametrize(("output", "stream"), [(1, "stdout"), (2, "stderr")])
def test_a_process_is_as_if_it_was_started_by_itself(output: int, stream: str, tmp_path: Path) -> None:
    command = ["timeit", "-n", "1", "-r", "1", SAYS.format(stream)]
    process = ForkedProcess(command, output, VARIABLES, tmp_path)
    with process.pipe as pipe:
        said = pipe.readline()
        assert process.wait(60) == 0
    assert said == f"{tmp_path} [('A', '1'), ('B', '2')] True\n"
    assert (process.returncode, process.poll()) == (0, 0)
    process.send_signal(signal.SIGTERM)


def test_a_process_gets_signals_and_is_killed(tmp_path: Path) -> None:
    for status in (-signal.SIGTERM, -signal.SIGKILL):
        process = ForkedProcess(["timeit", "-n", "1", "-r", "1", STANDS], 1, VARIABLES, tmp_path)
        with process.pipe as pipe:
            assert pipe.readline() == "stands\n"
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired) as caught:
                process.wait(0.01)
            assert caught.value.timeout == 0.01
            if status == -signal.SIGKILL:
                process.kill()
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait() == status


def test_a_command_runs_to_its_end() -> None:
    done = run(["nothing"], os.environ, 120)
    assert (done.args, done.returncode, done.stdout) == (["penstock", "nothing"], 2, "")
    assert "unknown command nothing" in done.stderr
    done = run(["--help"], os.environ, 120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: penstock")


def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run(["serve", "--port", "0"], os.environ, 0.01)
    assert (caught.value.cmd, caught.value.timeout) == (["penstock", "serve", "--port", "0"], 0.01)
