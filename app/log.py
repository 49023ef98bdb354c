"""The server's log: plain lines on stderr, a progress bar where somebody is watching."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from threading import Timer
from typing import Literal

log = logging.getLogger("penstock")

Progress = Callable[[str], AbstractContextManager[Callable[[float], None]]]
"""Takes a title and returns a function that takes the fraction done."""

_LINE_EVERY_S = 2.0
_SILENT_S = 1.0


class _Line(logging.Formatter):
    """`12:00:00 message`, with the level in front if it is above info."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


class _Json(logging.Formatter):
    """One object a line: time, level, logger and message, and the `fields` that a record may have."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_log(level: str, form: Literal["plain", "json"] = "plain", *, access: bool = False) -> None:
    """Shows our own lines from `level` on, with `access` also one for each request; of libraries only errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Line())
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    log.setLevel(level.upper())
    log.getChild("access").setLevel(logging.NOTSET if access else logging.WARNING)


@contextmanager
def said_if_slow(text: str, *values: object) -> Iterator[None]:
    """Logs a task that takes more than a second."""
    timer = Timer(_SILENT_S, log.info, (text, *values))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def progress_bar(title: str) -> AbstractContextManager[Callable[[float], None]]:
    """Returns a function that takes the fraction done: a bar on a terminal, a line every few seconds elsewhere."""
    return _shown(title, None, lambda fraction: f"{fraction * 100:.0f} %")


def counter(title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Like `progress_bar`, but the function takes the number of finished requests, out of `total`."""
    return _shown(title, total, lambda done: f"{done:,} of {total:,} requests")


@contextmanager
def silent(title: str, total: int = 0) -> Iterator[Callable[[float], None]]:  # noqa: ARG001
    """In place of `progress_bar` and `counter`, shows nothing."""
    yield lambda _: None


@contextmanager
def _shown(title: str, total: int | None, text: Callable[[float], str]) -> Iterator[Callable[[float], None]]:
    """`total` is None for fractions; `text` is how a line says how much is done."""
    if sys.stderr.isatty() or _is_notebook():
        with _bar(title, total) as update:
            yield update
    else:
        yield _lines(title, text)


def _is_notebook() -> bool:
    """Returns whether a progress bar can be shown here: without its widgets, rich only warns."""
    if "IPython" not in sys.modules or find_spec("ipywidgets") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = () if total is None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0 if total is None else total)
        yield lambda done: bar.update(task, completed=done)


def _lines(title: str, text: Callable[[float], str]) -> Callable[[float], None]:
    last_s = time.monotonic()

    def update(done: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _LINE_EVERY_S:
            last_s = time.monotonic()
            log.info("%s: %s", title, text(done))

    return update
