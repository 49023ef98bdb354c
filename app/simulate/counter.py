"""How many requests are done, on stderr, while a simulation runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.log import log

_LINE_EVERY_S = 2.0


@contextmanager
def counter(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many of `total` are done: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        with _bar(title, total) as update:
            yield update
    else:
        yield _lines(title, total)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(title: str, total: int) -> Callable[[int], None]:
    last_s = time.monotonic()

    def update(done: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _LINE_EVERY_S:
            last_s = time.monotonic()
            log.info("%s: %s of %s requests", title, f"{done:,}", f"{total:,}")

    return update
