"""Runs two pieces of work on a device at the same time, where only the order of launches keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

_First = TypeVar("_First")
_Second = TypeVar("_Second")


def beside(
    device: torch.device, first: Callable[[], _First], second: Callable[[], _Second]
) -> tuple[_First, _Second]:
    """Returns both results; in a CUDA graph being captured, the second runs on a stream of its own at the same time.

    Shared experts run so, at the same time as the experts that a router chooses. Their tiles could be in the same
    grouped launch only if they had the width, the format and the ranks of the others, which they need not have; a
    second branch of the graph asks nothing of them, and a replay launches it with the rest. Steps that are launched
    kernel by kernel have no use for it: large ones fill the device with either, and to order streams takes the host as
    long as to launch a kernel.

    The side stream waits for all work launched before, every time, and is waited for: so memory that either stream
    gives back is not taken again before the other has done with it.
    """
    if device.type != "cuda":
        return first(), second()
    side = _side_stream(device)  # made in the step that runs before it is captured
    if not torch.cuda.is_current_stream_capturing():
        return first(), second()
    main = torch.cuda.current_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        of_second = second()
    of_first = first()
    main.wait_stream(side)
    return of_first, of_second


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
