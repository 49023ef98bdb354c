"""Compiles the package's kernels ahead of time, without a GPU, and reads off what became of them.

A module `cases_*.py` of this folder lists in `CASES` the variants of its kernels that are served: those that `recorded`
sees a call launch, over tensors that nobody fills. Kernels are compiled in a process of their own, since in that of the
tests triton interprets. The compiler looks annotations up, too, and knows of nothing outside `tl`: an argument that is
no constexpr is a `tl.tensor`, not `Any`.

    python -m tests.engine.kernels.triton.compiling [parts of cases' names]
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from penstock.engine.cores import num_cores

META = torch.device("meta")
"""Tensors there have a shape and a type, and no memory."""
ARCHITECTURES = (80, 90, 100, 120)
"""A100, H100, B200 and RTX 50."""
LARGEST_DOT = {
    80: "mma.sync",
    86: "mma.sync",
    89: "mma.sync",
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
    120: "mma.sync",
}
"""The instruction that multiplies most at a time."""
SHARED_LIMIT = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
"""Bytes of shared memory that one block may have (CUDA C++ programming guide, compute capabilities)."""
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_LOCAL_ACCESS = re.compile(r"\b(STL|LDL)\b")
_TENSOR_CORES = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant of a kernel, as it is launched."""

    name: str
    kernel: Any
    """The function that `@triton.jit` returned."""
    arguments: Mapping[str, str]
    """Type of every argument that is no constexpr: "*bf16", "*i32", "i32", "fp32"."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """An argument that is None at launch belongs here, too."""
    aligned: tuple[str, ...] = ()
    """Integers that are multiples of 16 at launch; pointers always are."""
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is told to the compiler at launch."""
    has_dot: bool = False
    """Must use tensor cores."""
    has_large_dot: bool = False
    """Must use them by the instructions that multiply a whole tile, where the architecture has some."""
    shared_bound: int | None = None
    """The shared memory that the choice of sizes reckoned with; None if it reckons with none."""
    most_spilled: int = 0
    """Bytes that may be spilled: of sizes that a card was measured to like all the same."""
    architectures: tuple[int, ...] = ARCHITECTURES
    """Those that it is launched on; `cases` leaves some of them out."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of ptxas for a case on one architecture."""

    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread; anything that is used of the stack counts."""
    shared_bytes: int
    """Per block."""
    tensor_cores: list[str]
    """Which of their instructions it has."""


def empty(*shape: int, dtype: torch.dtype = torch.int32, device: torch.device | None = None) -> Tensor:
    """A tensor whose memory nobody touches; what no machine has memory for is on META."""
    return torch.empty(shape, dtype=dtype, device=device)


def recorded(
    name: str, call: Callable[[], object], architectures: tuple[int, ...] = ARCHITECTURES
) -> list[Case]:
    """What the call launches, in its order; nothing runs."""
    launched: list[Case] = []

    def launch(kernel: Any, _: object) -> Callable[..., None]:
        def note(*arguments: Any, **named: Any) -> None:
            values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
            whose = f"{kernel.__name__.removesuffix('_kernel')} {len(launched)}, {name}"
            launched.append(_as_launched(whose, kernel, values, architectures))

        return note

    with patch.object(KernelInterface, "__getitem__", launch):
        call()
    return launched


def _as_launched(name: str, kernel: Any, values: dict[str, Any], architectures: tuple[int, ...]) -> Case:
    """The variant that Triton compiles for these values: integers are told apart by 1, by 16 and by 32 bits."""
    parameters = inspect.signature(kernel.fn).parameters
    settings = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # interpreted, or compiled
    arguments, constexprs, aligned = dict[str, str](), dict[str, Any](), list[str]()
    for argument, parameter in parameters.items():
        value = values[argument]
        is_special = isinstance(value, int) and argument not in (settings["do_not_specialize"] or ())
        if isinstance(value, Tensor):
            arguments[argument] = f"*{_TYPES[value.dtype]}"
        elif "constexpr" in str(parameter.annotation) or value is None or (is_special and value == 1):
            constexprs[argument] = value
        elif isinstance(value, float):
            arguments[argument] = "fp32"
        else:
            arguments[argument] = "i32" if abs(value) < 1 << 31 else "i64"
            if is_special and value % 16 == 0:
                aligned.append(argument)
    options = {option: value for option, value in values.items() if option not in parameters}
    return Case(
        name=name,
        kernel=kernel,
        arguments=arguments,
        constexprs=constexprs,
        aligned=tuple(aligned),
        num_warps=options.pop("num_warps", 4),
        num_stages=options.pop("num_stages", 3),
        options=options,
        architectures=architectures,
    )


@functools.cache
def cases() -> tuple[Case, ...]:
    """All cases of the folder, by module, each variant once.

    A kernel's first variant has all architectures, and so has each that uses tensor cores, which differ most between
    them. Of the others each has one, in turn.
    """
    package = importlib.import_module(__package__ or "")
    turns: Counter[str] = Counter()
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("cases_"):
            for case in importlib.import_module(f"{__package__}.{module.name}").CASES:
                variant = repr(replace(case, name=""))
                if variant in found:
                    continue
                if case.architectures == ARCHITECTURES and not case.has_dot:
                    turn = turns[case.kernel.__name__]
                    turns[case.kernel.__name__] += 1
                    case = case if turn == 0 else replace(case, architectures=(ARCHITECTURES[turn % 4],))
                found[variant] = case
    return tuple(found.values())


def compile_all(keys: Sequence[str]) -> dict[str, Compiled | str]:
    """Returns the result of each case on an architecture, by `key`; a text is the error that stopped it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", __name__, *keys],
        cwd=Path(__file__).parents[4],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"the compiling process failed:\n{finished.stderr}")
    results = (json.loads(line) for line in finished.stdout.splitlines())
    return {line["key"]: line["error"] or Compiled(**line["compiled"]) for line in results}


def key(case: Case, architecture: int) -> str:
    """Names one case on one architecture."""
    return f"{case.name}-sm_{architecture}"


def compile_case(case: Case, architecture: int) -> Compiled:
    """Compiles one case; triton must not be interpreting."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.arguments.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in case.aligned]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options},
    )
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        tensor_cores=sorted(set(_TENSOR_CORES.findall(compiled.asm["ptx"]))),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run_tool("cuobjdump", "--dump-resource-usage", file.name)
        usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
        if usage["STACK"] and not _LOCAL_ACCESS.search(_run_tool("nvdisasm", file.name)):
            usage["STACK"] = 0  # reserved, and never used
    return {name: usage[name] for name in ("REG", "STACK", "LOCAL")}


def _run_tool(name: str, *arguments: str) -> str:
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _attempt(index: int, architecture: int) -> str:
    case = cases()[index]
    line: dict[str, Any] = {"key": key(case, architecture), "compiled": None, "error": None}
    try:
        line["compiled"] = asdict(compile_case(case, architecture))
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"
    return json.dumps(line)


def _main(*parts: str) -> None:
    wanted = [
        (index, architecture)
        for index, case in enumerate(cases())
        for architecture in case.architectures
        if any(part in key(case, architecture) for part in parts or ("",))
    ]
    with ProcessPoolExecutor(num_cores()) as pool:
        for line in pool.map(_attempt, *zip(*wanted, strict=True)):
            print(line, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
