"""Work on many tensors, done in threads ahead of the caller that takes the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_MOST_THREADS = 8
"""The most threads: each of them holds its result, and the inputs of it."""


def in_order(works: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yields what some functions return, in their order; the next ones run meanwhile, in threads.

    There are as many threads as torch has. In each of them torch works alone: its own threads wait for each other, and
    for a whole time slice wherever another process has one of their cores.
    """
    torch_threads = torch.get_num_threads()
    num_threads, waiting = min(torch_threads, _MOST_THREADS), deque[Future[T]]()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for work in works:
                waiting.append(pool.submit(work))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(torch_threads)  # later threads take on the number set last
