"""The compiled kernels: the shared library, its C interface, and the team of threads that runs it.

Calls into the library hold no GIL.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.cores import num_cores
from penstock.engine.kernels.cpu import prebuilt, structs
from penstock.engine.kernels.cpu.build import LevelUnknown, NativeUnavailable, build
from penstock.engine.kernels.cpu.levels import Level, Machine, requested, this_machine

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 4}
"""The storage types of the kernels."""

ERRORS = {
    1: "a token id is outside the vocabulary",
    2: "a position is outside its sequence, its block table or the model's context",
    3: "a block table names a block that does not exist",
    4: "query_starts does not divide the tokens",
    5: "a sample row is not a token of the batch",
    7: "a state slot does not exist",
    8: "a state is asked for after more rows than there are, or with more pending ones than a slot has",
    9: "a seat does not exist",
}
NO_MEMORY = 6

_MAPPED_BYTES = 1 << 25
"""From so many bytes on, glibc maps memory anew each time, and its page faults take longer than most products."""
_OWN_REFERENCES = 2
"""The references of an attribute and of the argument of `sys.getrefcount`."""

KINDS = (
    "other",
    "embed",
    "norm",
    "prepare",
    "qkv",
    "place",
    "attention",
    "o",
    "gate_up",
    "down",
    "gather",
    "head",
    "route",
    "combine",
    "gates",
    "conv",
    "state",
)
"""The kinds of work that a team's phases are parts of; threads.h has the same order."""

BLOCK_SIZE = 16
"""Tokens per KV block; the layout of the cache is made for it."""
MAX_ROW = 1 << 15
"""The numbers of the widest row that goes through the scratch of a thread, `kWidestRow`."""

_POINTER = c_void_p
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "penstock_sizes": (ctypes.POINTER(c_int32), ()),
    "penstock_team_new": (_POINTER, (c_int32,)),
    "penstock_team_free": (None, (_POINTER,)),
    "penstock_team_time": (None, (_POINTER, c_int32)),
    "penstock_team_times": (None, (_POINTER, _POINTER)),
    "penstock_linear_new": (_POINTER, (_POINTER, _POINTER)),
    "penstock_linear_of_blocks": (_POINTER, (_POINTER, _POINTER)),
    "penstock_linear_free": (None, (_POINTER,)),
    "penstock_linear_cap": (None, (_POINTER, c_float, c_float)),
    "penstock_linear_bytes": (c_int64, (_POINTER,)),
    "penstock_linear_form": (c_int32, (_POINTER,)),
    "penstock_linear_unpack": (None, (_POINTER, _POINTER, _POINTER)),
    "penstock_linear_apply": (c_int32, (_POINTER, _POINTER, _POINTER, c_int64, c_int32, _POINTER)),
    "penstock_decoder_new": (_POINTER, (_POINTER, _POINTER)),
    "penstock_decoder_set_program": (None, (_POINTER, _POINTER, c_int32)),
    "penstock_decoder_free": (None, (_POINTER,)),
    "penstock_decoder_run": (c_int32, (_POINTER, _POINTER, _POINTER)),
    "penstock_decoder_take_touched": (None, (_POINTER, _POINTER)),
    "penstock_decoder_take_rows": (None, (_POINTER, _POINTER)),
    "penstock_run_experts": (c_int32, (_POINTER,) * 3 + (c_int32,) + (_POINTER,) * 3),
    "penstock_route": (c_int32, (_POINTER, _POINTER, c_int32, _POINTER, _POINTER)),
    "penstock_chooser_new": (_POINTER, (_POINTER,)),
    "penstock_chooser_free": (None, (_POINTER,)),
    "penstock_choose": (c_int32, (_POINTER, _POINTER)),
    "penstock_likely": (c_int32, (_POINTER, _POINTER)),
    "penstock_drafts_new": (_POINTER, (_POINTER,) * 5),
    "penstock_drafts_free": (None, (_POINTER,)),
    "penstock_drafts_run": (c_int32, (_POINTER, _POINTER, _POINTER, c_int32, _POINTER)),
    "penstock_steps_new": (_POINTER, (_POINTER,) * 5),
    "penstock_steps_free": (None, (_POINTER,)),
    "penstock_steps_put": (c_int64, (_POINTER, _POINTER)),
    "penstock_steps_run": (c_int32, (_POINTER,) * 3),
    "penstock_steps_wait": (c_int32, (_POINTER, c_int64, _POINTER)),
    "penstock_steps_drain": (None, (_POINTER,)),
    "penstock_round_with_offsets": (
        None,
        (_POINTER, _POINTER, c_int64, c_int64, c_int32, c_int32, _POINTER, _POINTER, _POINTER),
    ),
    "penstock_round_to_largest": (None, (_POINTER, c_int64, c_int64, c_int32, _POINTER, _POINTER)),
    "penstock_gather": (c_int32, (_POINTER,)),
    "penstock_measure_peak": (c_double, (_POINTER, c_int32)),
    "penstock_measure_reading": (c_double, (_POINTER, _POINTER, c_int64, c_int32, c_int32)),
    "penstock_measure_products": (c_double, (_POINTER, _POINTER, c_int32, c_int32, c_int32)),
}


class NativeLibrary:
    """The compiled kernels of one level of instruction sets; `level` is its name, `text` describes it."""

    def __init__(self, path: str, level: Level) -> None:
        self.path, self.level, self.text = path, level.name, level.text
        try:
            self._dll = ctypes.CDLL(path)
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self._dll, name)
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"cannot load {path}: {error}") from error
        sizes, own = self.call("penstock_sizes"), [ctypes.sizeof(struct) for struct in structs.ALL]
        if sizes[: len(own) + 1] != [*own, 0]:
            raise NativeUnavailable(f"cannot load {path}: its structures are not those of this version")

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._dll, name)(*arguments)

    def function(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._dll, name)
        return found

    def start_team(self, num_threads: int | None = None) -> Team:
        """Starts a team; without `num_threads` it has a thread for every core that this process may use."""
        return Team(self, num_threads or num_cores())


def load_library(say: Callable[[str], None], level: Level | None = None) -> NativeLibrary:
    """Loads the library of the best level that this machine can use: a prebuilt one, or one that is compiled first.

    Args:
        say: is called with a line when that takes a while, and when something keeps a better level or a prebuilt
            library from being used.
        level: is taken instead; without it PENSTOCK_CPU_ISA may name one.

    Raises:
        InstructionSetError: there is no level of that name, or this machine cannot use it.
        NativeUnavailable: there is no compiler, or it fails; plain torch can do the same work.
    """
    machine = this_machine()
    if level is None and (name := requested()):
        level = machine.named(name)
    if level is not None:
        return _open([level], say)
    if refusal := _refusal(machine):
        say(refusal)
    return _open(machine.usable(), say)


def _refusal(machine: Machine) -> str:
    """The line that says that Linux keeps this process from tiles that the processor has; "" if it does not."""
    better = machine.better()
    if better is None or not machine.has(better[0]):
        return ""
    return f"CPU kernels for {machine.usable()[0].name} serve in place of {better[0].name}: {better[1]}"


def _open(levels: Sequence[Level], say: Callable[[str], None]) -> NativeLibrary:
    """Opens the first of the levels, the best first, whose library can be had.

    A lower level is taken if the compiler does not know the best, or if there is no compiler and the lower one is
    prebuilt.
    """
    reasons: list[NativeUnavailable] = []
    for level in levels:
        try:
            library = _open_prebuilt(level, say) or _open_built(level, reasons, say)
        except NativeUnavailable as error:
            reasons.append(error)
            continue
        if reasons:
            say(f"CPU kernels for {level.name} serve in place of {levels[0].name}: {reasons[0]}")
        return library
    raise reasons[0]


def _open_prebuilt(level: Level, say: Callable[[str], None]) -> NativeLibrary | None:
    path = prebuilt.find(level, say)
    if path is None:
        return None
    try:
        return _loaded(str(path), level)
    except NativeUnavailable as error:
        say(f"a prebuilt library of the CPU kernels is ignored: {error}")
        return None


def _open_built(level: Level, reasons: list[NativeUnavailable], say: Callable[[str], None]) -> NativeLibrary:
    """Opens the library that the compiler makes.

    Args:
        reasons: why better levels could not be had.
    """
    for reason in reasons:
        if not isinstance(reason, LevelUnknown):
            raise reason  # a build that failed once would fail again
    return _loaded(str(build(level, say)), level)


@functools.cache
def _loaded(path: str, level: Level) -> NativeLibrary:
    return NativeLibrary(path, level)


@dataclass(frozen=True, slots=True)
class KindTime:
    """The time that the phases of one kind took together."""

    open_ns: int
    """From the opening of each phase to the opening of the next; all kinds together give the time of the programs."""
    busy_ns: int
    """In their chunks, summed over the threads; the rest of threads * open_ns was waiting."""
    num_phases: int


class Team:
    """Threads that work on one call at a time, the caller as one of them, and sleep in between.

    The caller that starts a team owns it. `close` joins the threads; the end of the program finds them asleep, or at
    work.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"a team needs at least 1 thread, not {num_threads}")
        self.library = library
        self.num_threads = num_threads
        self.handle = created(library.call("penstock_team_new", num_threads))
        self._close = freed_with(self, library, "penstock_team_free", self.handle)
        self._kept: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def empty(self, num_rows: int, num_columns: int) -> Tensor:
        """A float32 tensor of any numbers; a large one lies where the last one lay if that is no longer referenced.

        Calls must come from one thread at a time.
        """
        size = num_rows * num_columns
        if 4 * size < _MAPPED_BYTES:
            return torch.empty((num_rows, num_columns))
        if self._kept.size < size or sys.getrefcount(self._kept) > _OWN_REFERENCES:
            self._kept = np.empty(size, np.float32)
        return torch.from_numpy(self._kept[:size]).view(num_rows, num_columns)

    def time(self, on: bool) -> None:
        """Begins to time the phases of the team's work, from 0, or stops.

        A team that is not timed, as at first, reads no clock.
        """
        self.library.call("penstock_team_time", self.handle, on)

    def times(self) -> dict[str, KindTime]:
        """Returns the time that the phases took since the timing began, by the kinds of KINDS."""
        numbers = (c_int64 * (3 * len(KINDS)))()
        self.library.call("penstock_team_times", self.handle, numbers)
        return {kind: KindTime(*numbers[3 * i : 3 * i + 3]) for i, kind in enumerate(KINDS)}

    def close(self) -> None:
        """Joins the threads; nothing may use the team any more."""
        self._close()


def created(handle: int | None) -> int:
    """The handle of a new object, or MemoryError if there is none."""
    if handle is None:
        raise MemoryError("the native kernels could not get their memory")
    return handle


def freed_with(owner: object, library: NativeLibrary, free: str, handle: int) -> weakref.finalize[..., Any]:
    """Frees a native object when its owner goes, or when the result is called.

    The end of the program frees nothing: another thread may be at work with it until the very last.
    """
    end = weakref.finalize(owner, library.call, free, handle)
    end.atexit = False
    return end


def check(status: int) -> None:
    """Raises the error that a status of the library stands for: none, MemoryError or ValueError."""
    if status == NO_MEMORY:
        raise MemoryError("the native kernels could not get their memory")
    if status:
        raise ValueError(ERRORS[status])


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def float32(tensor: Tensor) -> Tensor:
    """The tensor as the kernels read small ones: contiguous float32 on the CPU."""
    return tensor.detach().to("cpu", torch.float32).contiguous()


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: {shape} expected, not {tuple(tensor.shape)}")


def expect_ints(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: contiguous int32 {shape} expected, not {tensor.dtype} {tuple(tensor.shape)}"
        )
