"""A Ray of one machine, for tests and measurements: `with LocalRay() as ray` starts it, and nothing of it is left.

It is a process of its own that Ray's other processes end with: this one imports nothing of Ray, and can be killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
_STOP_S = 30.0
_TRIES = 3
"""Ray gives up on itself after 30 s, where a machine is busy."""
_OBJECTS_BYTES = 80 * 1024 * 1024


class LocalRay:
    """Told cores are those that Ray hands out, whatever the machine has."""

    def __init__(self, num_cpus: int) -> None:
        # Names of sockets in it must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        """For those who are to reach it."""
        self._num_cpus = num_cpus
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> LocalRay:
        for _ in range(_TRIES):
            self._start()
            if self.address:
                return self
            self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        raise RuntimeError("Ray did not start")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.local_ray", str(self._num_cpus), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main(num_cpus: int, folder: str) -> None:
    """Says where Ray listens, and ends with the standard input."""
    import ray

    signal.alarm(int(START_S))
    context = ray.init(
        num_cpus=num_cpus,
        num_gpus=0,
        object_store_memory=_OBJECTS_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    signal.alarm(0)
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
