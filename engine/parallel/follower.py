"""A rank other than 0: a process that loads its part of a model, and runs the steps that rank 0 sends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import assert_never

from penstock.engine.errors import CheckpointError, NotEnoughMemory
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.parallel.group import Group
from penstock.engine.parallel.messages import ChooseTokens, Forget, Launch, Listener, Load
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.step import StepPlan


def main(descriptor: int, rank: int, size: int, meeting: str, on_cuda: bool) -> None:
    """Serves rank 0 at the other end of a socket, until that is closed.

    A failure here is one of all ranks: it is reported in one line, and the process ends, which rank 0 notices.
    """
    rank_0: Connection[object, object] = Connection(descriptor)
    try:
        rank_0.send(None)  # all that could go wrong alone went well: the others may wait for this rank
        follower = _Follower(Group(rank, size, Path(meeting), on_cuda=on_cuda), rank_0.send)
        while True:
            message = rank_0.recv()
            assert isinstance(message, Load | Launch | ChooseTokens | Forget)
            follower.take(message)
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"penstock: rank {rank} failed: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
        os._exit(1)  # the process group's own end could wait for the other ranks


class _Follower:
    """Executes the messages.

    Args:
        answer: takes the answer to a message that has one.
    """

    def __init__(self, group: Group, answer: Callable[[Exception | None], None]) -> None:
        self._group = group
        self._answer = answer
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
            case Forget():
                self._runner.forget(self._listener.forgotten(message))
            case _:
                assert_never(message)

    def _load(self, message: Load) -> None:
        self._listener = Listener()
        self._runner = ModelRunner(
            lambda: load_model(
                message.folder, message.options, lambda _: None, lambda *_: None, ranks=self._group
            )
        )
        try:
            self._runner.load()
        except (CheckpointError, NotEnoughMemory) as error:
            self._answer(error)
            raise SystemExit(0) from None
        self._answer(None)
