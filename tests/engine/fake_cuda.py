"""A CUDA device that is not there: tensors that say they are on it, and a queue that the host may run ahead of.

Under `FakeCuda` a tensor made on "cuda" is computed on the CPU and watched. What a real device would make the host wait
for, or refuse, raises: values that are asked for, copies by way of memory that is not pinned, tensors of both sides in
one operation, pinned memory that is touched before an event says that its copy is done. Triton kernels do nothing, and
what was never written is 0. A graph runs its operations again, on the memory that they had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GIB = 1 << 30

_WAITING = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave", "histc", "_assert_async",
}  # fmt: skip
"""Operations whose result, or whose result's shape, the host has to be told."""


class HostWaits(AssertionError):
    """The host would wait for the device."""


class Mixed(AssertionError):
    """Tensors of both sides in one operation."""


class Raced(AssertionError):
    """Pinned memory was touched while a copy from it or to it may be under way."""


class OnCuda(Tensor):
    """A tensor on the device. To torch's own code it is one without memory, so that no device is looked for."""

    held: Tensor
    """On the CPU."""

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCuda:
        made: OnCuda = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"),
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of FakeCuda")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class _Done:
    """An operation of a graph."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    def again(self) -> None:
        results = [t for t in tree_leaves(self.func(*self.args, **self.kwargs)) if isinstance(t, Tensor)]
        for old, new in zip(self.results, results, strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entering it makes the device; `patched` puts it in the place of `torch.cuda`."""

    active: ClassVar[FakeCuda]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_watched = False
        """Whether the host may not wait now."""
        self.recorded: list[_Done] | None = None
        self.open_pools: set[int] = set()
        self.num_replays = 0
        self.launched: set[str] = set()
        """Names of Triton kernels."""
        self._pinned: dict[int, Tensor] = {}
        """By address; kept alive, so that no other memory ever has it."""
        self._under_way: list[tuple[int, bool]] = []
        """Copies by address of the pinned memory, and whether it is written, in the order of the queue."""
        self._num_done = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        before, self.is_watched = self.is_watched, True
        try:
            yield
        finally:
            self.is_watched = before

    def wait(self, reason: str) -> None:
        if self.is_watched:
            raise HostWaits(reason)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether something that is under way comes there."""
        return (_address(tensor), True) in self._under_way

    def mark(self) -> int:
        """A place in the queue."""
        return self._num_done + len(self._under_way)

    def has_reached(self, mark: int) -> bool:
        return mark <= self._num_done

    def reach(self, mark: int) -> None:
        """The device has come to that place."""
        self._under_way = self._under_way[max(0, mark - self._num_done) :]
        self._num_done = max(mark, self._num_done)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if name in ("pin_memory", "_pin_memory"):
            return self._pin(args[0].clone())
        if name == "is_pinned":
            return self._is_pinned(args[0])
        with self:
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if not isinstance(tensor, OnCuda)]
        is_on_device = len(here) < len(tensors)
        if name in ("_to_copy", "copy_"):
            source, target = (args[0], kwargs.get("device")) if name == "_to_copy" else (args[1], args[0])
            to_device = isinstance(target, OnCuda) if name == "copy_" else _is_cuda(target, source)
            if to_device != isinstance(source, OnCuda):
                return self._cross(func, args, kwargs, source, target, to_device)
            is_on_device = to_device
        else:
            self._check(name, args, tensors, here, is_on_device)
            is_on_device = _is_cuda(kwargs.get("device"), *tensors)
        self._check_races(func, args, here)
        pins = kwargs.pop("pin_memory", False)
        found = self._compute(func, name, args, kwargs, is_on_device)
        return self._pin(found) if pins else found

    def _check(
        self, name: str, args: Any, tensors: list[Tensor], here: list[Tensor], on_device: bool
    ) -> None:
        if not on_device:
            return
        if name in _WAITING:
            self.wait(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
            if masks:
                self.wait(f"{name} by a mask")
            if here:
                raise Mixed(f"{name} by what is on the host")
        if any(tensor.dim() for tensor in here):
            raise Mixed(f"{name} of {[str(tensor.device) for tensor in tensors]}")

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], is_on_device: bool) -> Any:
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        known = {id(t.held): t for t in tree_leaves((args, kwargs)) if isinstance(t, OnCuda)}
        args, kwargs = tree_map(lambda t: t.held if isinstance(t, OnCuda) else t, (args, kwargs))
        found = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if "empty" in name:
            results[0].zero_()
        elif self.recorded is not None and is_on_device:
            self.recorded.append(_Done(func, args, kwargs, results))
        if not is_on_device:
            return found
        return tree_map(lambda t: _wrapped(t, known) if isinstance(t, Tensor) else t, found)

    def _cross(
        self, func: Any, args: Any, kwargs: dict[str, Any], source: Tensor, target: Any, to_device: bool
    ) -> Any:
        """A copy from one side to the other."""
        assert self.recorded is None, "no graph copies from or to the host"
        is_async = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
        host = source if to_device else target
        is_pinned = isinstance(host, Tensor) and self._is_pinned(host)
        if not (is_async and is_pinned):
            self.wait(f"a copy {'to' if to_device else 'from'} the device, pinned: {is_pinned}")
        self._check_races(func, args, [host] if isinstance(host, Tensor) else [])
        if is_async and is_pinned:
            self._under_way.append((_address(host), not to_device))
        if isinstance(target, Tensor):
            _held(target).copy_(_held(source))
            return target
        moved = _held(source).to(kwargs.get("dtype") or source.dtype, copy=True)
        return _on_cuda(moved) if to_device else moved

    def _check_races(self, func: Any, args: Any, here: list[Tensor]) -> None:
        writes = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in here:
            changes = any(tensor is value for value in writes) and self._is_under_way(tensor)
            if changes or (not func.is_view and self.is_written(tensor)):
                raise Raced(str(func))

    def _is_under_way(self, tensor: Tensor) -> bool:
        return any(address == _address(tensor) for address, _ in self._under_way)

    def _pin(self, tensor: Tensor) -> Tensor:
        assert self.recorded is None, "no memory is pinned while a graph is recorded"
        self._pinned[_address(tensor)] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, OnCuda) and _address(tensor) in self._pinned


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, OnCuda) else tensor


def _on_cuda(held: Tensor) -> OnCuda:
    with torch.inference_mode(False):  # else no view could be made of it outside of that mode
        return OnCuda(held)


def _wrapped(held: Tensor, known: dict[int, OnCuda]) -> OnCuda:
    return known[id(held)] if id(held) in known else _on_cuda(held)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_cuda(device: Any, *tensors: Tensor) -> bool:
    """Where a result is: on the device that was asked for, or else where the tensors are."""
    if device is None:
        return any(isinstance(tensor, OnCuda) for tensor in tensors)
    return torch.device(device).type in ("cuda", "meta")


class Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, **_: object) -> None:
        self._mark = 0

    def record(self) -> None:
        self._mark = FakeCuda.active.mark()

    def elapsed_time(self, end: Event) -> float:
        """A millisecond for each operation between the two, which are behind the device."""
        assert FakeCuda.active.has_reached(end._mark)
        return float(end._mark - self._mark)

    def synchronize(self) -> None:
        FakeCuda.active.wait("an event")
        FakeCuda.active.reach(self._mark)


class CudaGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.work: list[_Done] = []

    def replay(self) -> None:
        FakeCuda.active.num_replays += 1
        for done in self.work:
            done.again()


@contextmanager
def _graph(graph: CudaGraph, pool: int) -> Iterator[None]:
    """A recording that fails leaves its pool open, as torch's does when the driver gives a capture up."""
    device = FakeCuda.active
    assert pool not in device.open_pools, "already recording to that pool"
    device.open_pools.add(pool)
    device.recorded = graph.work
    try:
        with device.watching():
            yield
    finally:
        device.recorded = None
    device.open_pools.remove(pool)


def _synchronize(*_: object) -> None:
    FakeCuda.active.wait("synchronize")
    FakeCuda.active.reach(FakeCuda.active.mark())


def _tolist(tensor: Tensor) -> Any:
    if isinstance(tensor, OnCuda):
        FakeCuda.active.wait("tolist")
    elif FakeCuda.active.is_written(tensor):
        raise Raced("tolist")
    return _listed(_held(tensor))


_listed = Tensor.tolist


def _launcher(kernel: Any, grid: object) -> Callable[..., None]:  # noqa: ARG001
    def launch(*args: object, **kwargs: object) -> None:
        FakeCuda.active.launched.add(kernel.fn.__name__)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not isinstance(value, OnCuda):
                raise Mixed(f"{kernel.fn.__name__} gets a tensor of the host")

    return launch


@contextmanager
def patched(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The device, in the place of `torch.cuda` and of Triton's launches."""
    from penstock.engine.kernels.triton.norms import rms_norm_kernel

    patch.setattr(type(rms_norm_kernel), "__getitem__", _launcher)
    patch.setattr(Tensor, "tolist", _tolist)
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _=None: (70 * GIB, 80 * GIB),
        "memory_allocated": lambda _=None: 0,
        "get_device_properties": lambda _: SimpleNamespace(
            name="pretended",
            multi_processor_count=132,
            major=9,
            minor=0,
            shared_memory_per_block_optin=227 << 10,
        ),
        "graph_pool_handle": count().__next__,
        "current_stream": lambda _=None: None,
        "CUDAGraph": CudaGraph,
        "graph": _graph,
        "Event": Event,
    }.items():
        patch.setattr(sys.modules["torch.cuda"], name, value)
    FakeCuda.active = FakeCuda()
    with FakeCuda.active:
        yield FakeCuda.active
