"""The machine: which card, which versions, how fast its clocks, how much of it is free."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from loadtests.gpu.figures import emit, emit_fact, say
from loadtests.gpu.packages import ROOT
from loadtests.gpu.sizes import Arguments, parse_arguments
from penstock.engine.cores import num_cores

GIB = 1 << 30
_ASKED = {
    "driver_version": "driver",
    "clocks.current.sm": "SM clock",
    "clocks.max.sm": "SM clock, most",
    "clocks.current.memory": "memory clock",
    "power.limit": "power limit",
    "temperature.gpu": "temperature, C",
    "mig.mode.current": "MIG",
}


def main() -> None:
    arguments = parse_arguments()
    emit_fact("device", _device_name(arguments))
    emit_fact("python", platform.python_version())
    emit_fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in ("triton", "transformers"):
        emit_fact(name, _version(name))
    emit_fact("host", f"{platform.machine()}, {num_cores()} cores")
    emit_fact("C compiler, which Triton needs", _compiler())
    if commit := _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]):
        emit_fact("commit", commit)
    if arguments.device.type == "cuda":
        _tell_card(arguments.device)


def _tell_card(device: torch.device) -> None:
    properties = torch.cuda.get_device_properties(device)
    emit_fact("compute capability", f"{properties.major}.{properties.minor}")
    emit_fact("multiprocessors", str(properties.multi_processor_count))
    free, total = torch.cuda.mem_get_info(device)
    emit_fact("memory", f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free")
    emit("free memory", free / GIB, "GiB")
    answer = _output(["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"])
    if answer is None:
        say("nvidia-smi says nothing: no clocks in the report")
        return
    for name, value in zip(_ASKED.values(), answer.splitlines()[0].split(","), strict=False):
        emit_fact(name, value.strip())


def _device_name(arguments: Arguments) -> str:
    return torch.cuda.get_device_name(arguments.device) if arguments.device.type == "cuda" else "a CPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _compiler() -> str:
    """Triton builds what launches its kernels, with Python's headers."""
    found = next((path for name in ("gcc", "clang") if (path := shutil.which(name))), None)
    compiler = os.environ.get("CC") or found or "none"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return compiler if header.exists() else f"{compiler}, but {header} is missing"


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    main()
