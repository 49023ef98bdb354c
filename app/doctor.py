"""`penstock doctor`: what this machine offers and what is missing, one line each."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.app.checkpoint import find_checkpoint, is_hub_id
from penstock.app.errors import OperatorError
from penstock.app.kernels import own_level
from penstock.app.listen import bind, certificate_of, check_exposure
from penstock.app.promises import remembered
from penstock.app.settings import EngineSettings, Settings
from penstock.engine.cores import num_cores
from penstock.engine.free_memory import available_bytes
from penstock.engine.kernels.cpu import prebuilt
from penstock.engine.kernels.cpu.build import NativeUnavailable, find_compiler
from penstock.engine.kernels.cpu.levels import this_machine
from penstock.engine.model.families import FAMILIES

_GIB = 1 << 30
_MIB = 1 << 20
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_CAPABILITY = (8, 0)


class Severity(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `advice` says what to do about anything that is not ok."""

    level: Severity
    name: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<9} {self.text}" + (f"; {self.advice}" if self.advice else "")


def run(settings: Settings) -> int:
    """Prints every check as it is made; 1 if one failed."""
    failed = False
    for check in checks(settings):
        print(check, flush=True)
        failed |= check.level is Severity.FAIL
    return int(failed)


def checks(settings: Settings) -> Iterator[Check]:
    yield check_python()
    yield check_processor()
    yield check_memory()
    yield check_torch()
    yield check_gpu(settings)
    yield check_compiler()
    yield check_kernels()
    yield check_model(settings)
    yield from check_types(settings)
    yield from check_promises(settings)
    yield check_families()
    yield check_port(settings)
    yield check_bench()


def check_python() -> Check:
    return Check(Severity.OK, "python", f"{platform.python_version()} at {sys.executable}")


def check_processor() -> Check:
    wanted = ("avx2", "f16c", "avx512f", "avx512_vnni", "amx_int8", "asimd")
    flags = [flag for flag in wanted if flag in _processor_flags()]
    text = f"{platform.machine()}, {num_cores()} cores, {' '.join(flags) or 'no vector units known'}"
    return Check(Severity.OK, "processor", text)


def _processor_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return set()


def check_memory() -> Check:
    free = available_bytes()
    text = f"{free / _GIB:.1f} GiB available"
    if free < _GIB:
        return Check(Severity.WARN, "memory", text, "close something, or serve a small model")
    return Check(Severity.OK, "memory", text)


def check_torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            Severity.FAIL, "torch", f"cannot be imported ({error})", "run make serve, or pip install -e ."
        )
    return Check(Severity.OK, "torch", str(torch.__version__))


def check_gpu(settings: Settings) -> Check:
    """The card, what of it is free, and whether our kernels run on it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(Severity.WARN, "gpu", f"unknown ({error})", "see torch")
    if not torch.cuda.is_available():
        return _no_gpu(settings, f"torch {torch.__version__}")
    free, total = torch.cuda.mem_get_info()
    capability = torch.cuda.get_device_capability()
    text = (
        f"{torch.cuda.get_device_name()}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, "
        f"compute capability {capability[0]}.{capability[1]}, CUDA {torch.version.cuda}"
    )
    if capability < _OLDEST_CAPABILITY:
        return Check(Severity.WARN, "gpu", text, "our kernels need 8.0 or newer; try --device cpu")
    if importlib.util.find_spec("triton") is None:
        return Check(Severity.WARN, "gpu", f"{text}, no Triton: plain torch serves", "pip install triton")
    if total - free > (1 - settings.gpu_memory_utilization) * total + _GIB:
        advice = f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} counts that too"
        return Check(Severity.WARN, "gpu", f"{text}, the rest is used by others", advice)
    return Check(Severity.OK, "gpu", text)


def _no_gpu(settings: Settings, torch_version: str) -> Check:
    if settings.device == "cuda":
        return Check(Severity.FAIL, "gpu", f"--device cuda is asked for, and {torch_version} sees none")
    if _NVIDIA_DRIVER.exists():
        advice = "install torch for CUDA to use the card"
        return Check(
            Severity.WARN, "gpu", f"there is an NVIDIA driver, and {torch_version} sees no card", advice
        )
    return Check(Severity.OK, "gpu", "none, models run on the processor")


def check_compiler() -> Check:
    """Looks where the build of the native kernels does: at $CXX first."""
    try:
        return Check(Severity.OK, "compiler", shlex.join(find_compiler()))
    except NativeUnavailable as error:
        if _is_prebuilt():
            return Check(Severity.OK, "compiler", f"{error}; none is needed: the native kernels are prebuilt")
        advice = "install g++ to have the fast ones (Debian: apt-get install g++)"
        return Check(Severity.WARN, "compiler", f"{error}, native kernels cannot be built", advice)


def _is_prebuilt() -> bool:
    level = own_level(this_machine())
    return prebuilt.find(level, lambda _: None) is not None


def check_kernels() -> Check:
    """Builds the native kernels if that was never done: then it is done."""
    try:
        from penstock.engine.kernels.cpu.native import load_library
    except (ImportError, OSError) as error:
        return Check(Severity.FAIL, "kernels", f"cannot be imported ({error})", "see torch")
    said: list[str] = []
    try:
        library = load_library(said.append)
    except NativeUnavailable as error:
        return Check(Severity.WARN, "kernels", f"plain torch: {error}", "a C++ compiler makes them native")
    ignored = [line for line in said if "ignored" in line]
    text = ", ".join([f"native, {library.level}: {library.text}", *ignored, *_better_level()])
    return Check(Severity.WARN if ignored else Severity.OK, "kernels", text)


def _better_level() -> list[str]:
    """Says what keeps this machine from the next better level of kernels, if there is one."""
    better = this_machine().better()
    return [] if better is None else [f"no {better[0].name}: {better[1]}"]


def check_model(settings: Settings) -> Check:
    if settings.model is not None and is_hub_id(settings.model):
        return Check(
            Severity.OK, "model", f"{settings.model} comes from the hub, unless it was fetched before"
        )
    try:
        return Check(Severity.OK, "model", str(find_checkpoint(settings.model, settings.revision)))
    except OperatorError as error:
        return Check(Severity.FAIL, "model", str(error))


def check_types(settings: EngineSettings) -> Iterator[Check]:
    """Says what a model on this machine takes with --dtype, --quantize and --kv-dtype, or why it is not served."""
    if settings.model is not None and is_hub_id(settings.model):
        return
    try:
        find_checkpoint(settings.model, settings.revision)
        from penstock.app.build import load_options
        from penstock.app.estimate import estimate
        from penstock.app.model import read_model
        from penstock.engine.errors import CheckpointError
        from penstock.engine.execution.loader import check_checkpoint
    except (OperatorError, ImportError, OSError):  # the checks of the model and of torch say it
        return
    try:
        model, options = read_model(settings), load_options(settings)
        check_checkpoint(model.folder, options)
        sizes = estimate(model.config, options)
    except (OperatorError, CheckpointError) as error:
        yield Check(Severity.FAIL, "types", str(error))
        return
    text = (
        f"weights {settings.quantize or sizes.dtype}, {sizes.weights / _MIB:.1f} MiB; "
        f"KV cache {sizes.kv_dtype}, {sizes.kv_of_a_token / 1024:.2f} KiB a token"
    )
    yield Check(Severity.OK, "types", text)


def check_promises(settings: EngineSettings) -> Iterator[Check]:
    """Says what the model's lanes promised when it was last served here."""
    if settings.model is not None and is_hub_id(settings.model):
        return
    with contextlib.suppress(OperatorError):  # the check of the model says it
        said = remembered(find_checkpoint(settings.model, settings.revision), settings)
        for promise in said or ["measured when the model is first served here"]:
            yield Check(Severity.OK, "promises", promise)


def check_families() -> Check:
    """Lists the architectures that are served."""
    return Check(Severity.OK, "families", ", ".join(FAMILIES))


def check_port(settings: Settings) -> Check:
    try:
        certificate_of(settings)
        with bind(settings.host, settings.port) as listener:
            check_exposure(listener, settings)
    except OperatorError as error:
        return Check(Severity.FAIL, "port", str(error))
    return Check(Severity.OK, "port", f"{settings.host}:{settings.port} is free")


def check_bench() -> Check:
    if importlib.util.find_spec("transformers") is None:
        advice = "pip install 'penstock[bench]' for transformers' generate as a baseline"
        return Check(Severity.OK, "bench", f"penstock bench is there; {advice}")
    return Check(Severity.OK, "bench", "transformers is there for penstock bench")
