"""Fixtures of all packages: a real server, and a real browser to look at it."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from loadtests.forked import ForkedServer
from penstock.app.log import log
from tests import published, tools
from tests.few import leave_combinations

# Triton decides when it is first imported whether it interprets, and other libraries import it, too.
if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TESTS = Path(__file__).parent

# The parent is named, because hypothesis itself has other defaults where it believes to be in CI.
settings.register_profile(
    "explore",
    parent=settings.get_profile("default"),
    max_examples=300,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow,),
    print_blob=True,
)
settings.register_profile("many", parent=settings.get_profile("explore"), max_examples=100, derandomize=True)
settings.register_profile("few", parent=settings.get_profile("many"), max_examples=20)
settings.register_profile(  # for tests.mutants: that a test fails is enough
    "mutants", parent=settings.get_profile("many"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves combinations to `make test-all` before tests are selected by their marks."""
    leave_combinations(items)
    mix(items)


def mix(items: list[pytest.Item]) -> None:
    """Puts files that wait for servers and browsers between those of the engine, which compute: no core is left idle.

    Both kinds come to their ends together, the page first of its kind: a browser that is waited for at the very end has
    nothing beside it.
    """
    items.sort(key=lambda item: item.path.parent.name != "static")
    num_items: Counter[bool] = Counter()
    starts: dict[Path, tuple[bool, int]] = {}
    for item in items:
        computes = (TESTS / "engine") in item.path.parents
        starts.setdefault(item.path, (computes, num_items[computes]))
        num_items[computes] += 1
    items.sort(key=lambda item: starts[item.path][1] / num_items[starts[item.path][0]])


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from going over all tests and libraries again and again: they stay to the end."""
    gc.collect()
    gc.freeze()


def left_out(items: Sequence[pytest.Item]) -> Counter[str]:
    """Counts tests that are marked as long, by the words of their mark."""
    marks = (item.get_closest_marker("long") for item in items)
    return Counter(mark.args[0] for mark in marks if mark is not None)


_LEFT = pytest.StashKey[Counter[str]]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remembers what `-m "not long"` leaves out."""
    if items:
        stash = items[0].config.stash
        stash[_LEFT] = stash.get(_LEFT, Counter()) + left_out(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the count from a worker of pytest-xdist, unless it crashed; every worker collects the same tests."""
    if left := getattr(node, "workeroutput", {}).get("left"):
        node.config.stash[_LEFT] = Counter(left)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Says on the last line which tests were left to `make test-all`."""
    left = session.config.stash.get(_LEFT, Counter())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = dict(left)
    yield
    if hasattr(session.config, "workeroutput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    skipped = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
    if num_skipped := sum(published.MISSING in reason for reason in skipped):
        reporter.write_line(f"skipped: {num_skipped} tests; {published.MISSING}")
    if lacks := tools.lacking(skipped):
        reporter.write_line(f"skipped: {lacks}")
    if left := session.config.stash.get(_LEFT, left):
        groups = ", ".join(f"{number} {group}" for group, number in left.most_common())
        reporter.write_line(f"left to make test-all: {left.total()} tests ({groups})")


@pytest.fixture(autouse=True)
def _log_is_left_as_it_was() -> Iterator[None]:
    """Logging is one for the whole process: what a test sets up is put back."""
    root, access, engine = logging.getLogger(), log.getChild("access"), log.getChild("engine")
    before = [(logger, logger.level) for logger in (root, log, access)]
    handlers, filters = list(root.handlers), list(engine.filters)
    yield
    root.handlers[:], engine.filters[:] = handlers, filters
    for logger, level in before:
        logger.setLevel(level)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are only slowed down by more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def live_server() -> Iterator[str]:
    """The address of a server that serves the demo model; it must end well, too."""
    server = ForkedServer()
    server.wait_ready()
    yield server.url
    assert server.stop() == 0, server.log


@pytest.fixture(scope="session")
def chromium_path() -> str:
    return tools.find(*tools.BROWSERS)
