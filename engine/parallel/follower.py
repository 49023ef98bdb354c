"""A rank other than 0: a process that loads its part of a model, and runs the steps that rank 0 sends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import assert_never

from penstock.engine.errors import CheckpointError, NotEnoughMemory
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.parallel.group import Grid, Processes
from penstock.engine.parallel.messages import ChooseTokens, Forget, Launch, Listener, Load
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.step import StepPlan, StepResult


def main(descriptor: int, rank: int, num_ranks: int, num_stages: int, meeting: str, on_cuda: bool) -> None:
    """Serves rank 0 at the other end of a socket, until that is closed.

    A failure here is one of all ranks: it is reported in one line, and the process ends, which rank 0 notices.
    """
    rank_0: Connection[object, object] = Connection(descriptor)
    grid = Grid(num_ranks, num_stages, on_cuda)
    with _ending(rank):
        rank_0.send(None)  # all that could go wrong alone went well: the others may wait for this rank
        processes = Processes(rank, grid, Path(meeting))
        results = partial(_Results, rank, rank_0.send)
        follower = _Follower(processes, rank_0.send, results, is_chooser=rank == grid.chooser)
        while True:
            message = rank_0.recv()
            assert isinstance(message, Load | Launch | ChooseTokens | Forget)
            follower.take(message)


@contextmanager
def _ending(rank: int) -> Iterator[None]:
    """Ends the process with what ends the block."""
    try:
        yield
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"penstock: rank {rank} failed: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
        os._exit(1)  # the process group's own end could wait for the other ranks


class _Results:
    """Waits for steps, and sends their results to rank 0, in a thread: rank 0 may send the next step before it reads
    the results of this one, and this process has to take it."""

    def __init__(self, rank: int, send: Callable[[StepResult], None]) -> None:
        self._rank, self._send = rank, send
        self._steps = SimpleQueue[StepInFlight]()
        Thread(target=self._run, daemon=True).start()

    def add(self, step: StepInFlight) -> None:
        self._steps.put(step)

    def _run(self) -> None:
        with _ending(self._rank):
            while True:
                self._send(self._steps.get().wait())


class _Follower:
    """Executes the messages.

    Args:
        answer: takes the answer to a message that has one.
        results: makes what takes the steps whose results this rank has.
        is_chooser: whether it has those of all steps.
    """

    def __init__(
        self,
        processes: Processes,
        answer: Callable[[Exception | None], None],
        results: Callable[[], _Results],
        *,
        is_chooser: bool,
    ) -> None:
        self._processes = processes
        self._answer = answer
        self._make_results, self._is_chooser = results, is_chooser
        self._results: _Results | None = None
        self._runner: ModelRunner
        self._listener: Listener
        self._plan: StepPlan
        self._step: StepInFlight

    def take(self, message: Load | Launch | ChooseTokens | Forget) -> None:
        match message:
            case Load():
                self._load(message)
            case Launch():
                self._plan = self._listener.plan(message)
                self._step = self._runner.launch(self._plan)
            case ChooseTokens():
                self._plan.masks = message.masks
                self._step.choose()
                if self._results is not None:
                    self._results.add(self._step)
            case Forget():
                self._runner.forget(self._listener.forgotten(message))
            case _:
                assert_never(message)

    def _load(self, message: Load) -> None:
        self._listener = Listener()
        self._results = None
        if self._is_chooser or message.options.data_parallel_attention:
            self._results = self._make_results()
        self._runner = ModelRunner(
            lambda: load_model(
                message.folder, message.options, lambda _: None, lambda *_: None, world=self._processes
            )
        )
        try:
            self._runner.load()
        except (CheckpointError, NotEnoughMemory) as error:
            self._answer(error)
            raise SystemExit(0) from None
        self._answer(None)
