"""Rank 0: starts the other ranks, sends them its steps, and notices when one of them is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError, NotEnoughMemory
from penstock.engine.kernels.ranks import World
from penstock.engine.model.dtype import choose_device
from penstock.engine.parallel.group import Grid, Processes
from penstock.engine.parallel.messages import ChooseTokens, Load, Message, Narrator
from penstock.engine.parallel.shared_plan import RowSpread, SharedPlan
from penstock.engine.planning.device import DeviceError, Runner, RunnerFacts, StepInFlight
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import StepPlan, StepResult

_START = """\
import sys
sys.path[:] = {path!r}
from penstock.engine.parallel import lifeline
lifeline.hold({descriptor})
from penstock.engine.parallel import follower
follower.main({descriptor}, {rank}, {num_ranks}, {num_stages}, {meeting!r}, {on_cuda})
"""
"""The program of a rank's process; it dies with this one from before it imports torch."""

_NEWS_S = 2.0
"""The time after a failed sum within which it is known which rank is gone."""
_END_S = 5.0
"""The time that a rank has to end after its socket was closed; then it is killed."""


def start_ranks(options: LoadOptions, say: Callable[[str], None]) -> Followers:
    """Starts the processes of all ranks but this one.

    Raises:
        CheckpointError: there are not enough GPUs.
        DeviceError: one of them ended at once.
    """
    on_cuda = choose_device(options.device).type == "cuda"
    grid = Grid(options.num_ranks, options.num_stages, on_cuda)
    if on_cuda and torch.cuda.device_count() < grid.size:
        asked = [("--tensor-parallel", grid.num_ranks), ("--pipeline-parallel", grid.num_stages)]
        flags = " ".join(f"{flag} {number}" for flag, number in asked if number > 1)
        raise CheckpointError(f"{flags}: torch sees {torch.cuda.device_count()} GPUs")
    followers = Followers(grid)
    pids = ", ".join(f"rank {rank} in process {pid}" for rank, pid in followers.pids.items())
    over, in_stages = "NCCL" if on_cuda else "gloo", f" in {grid.num_stages} stages" * (grid.num_stages > 1)
    say(
        f"{grid.size} ranks{in_stages} run the model together over {over}: rank 0 here, {pids}; memory is told of one"
    )
    try:
        followers.join()
    except BaseException:
        followers.close()
        raise
    return followers


class Followers:
    """The ranks from 1 on, each a process at the other end of a socket.

    Each side learns by the closed socket that the other is gone, for any reason.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._processes: Processes | None = None
        self._folder = TemporaryDirectory(prefix="penstock-ranks-")
        self._meeting = str(Path(self._folder.name) / "meeting")
        self._sockets: dict[int, Connection[object, object]] = {}
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._loss = ""
        self._has_loss = threading.Event()
        self._is_closing = False
        for rank in range(1, grid.size):
            self._start(rank)

    @property
    def pids(self) -> dict[int, int]:
        """The processes by rank."""
        return {rank: process.pid for rank, process in self._started.items()}

    @property
    def world(self) -> Processes:
        """All ranks, this one included; there once they have joined."""
        if self._processes is None:
            raise RuntimeError("the ranks have not joined")
        return self._processes

    def join(self) -> None:
        """Makes the process group, once all ranks have come up.

        Raises:
            DeviceError: one ended before.
        """
        for rank in self._sockets:
            self._receive(rank)
        self._processes = Processes(0, self.grid, Path(self._meeting))

    def tell_each(self, messages: Iterable[Message]) -> None:
        """Sends one message to each rank, from rank 1 on.

        Raises:
            OSError: a rank is gone.
        """
        for socket, message in zip(self._sockets.values(), messages, strict=True):
            socket.send_bytes(ForkingPickler.dumps(message))

    def tell(self, message: Message) -> None:
        """
        Raises:
            OSError: a rank is gone.
        """
        pickled = ForkingPickler.dumps(message)
        for socket in self._sockets.values():
            socket.send_bytes(pickled)

    def wait_loaded(self, patience_s: float | None = None) -> None:
        """Waits until all have answered `Load`, for each at most so long if `patience_s` says so.

        Raises:
            CheckpointError, NotEnoughMemory: the first rank that could not load its part says why.
            DeviceError: one is gone.
        """
        for rank, socket in self._sockets.items():
            answer = self._receive(rank) if socket.poll(patience_s) else None
            if isinstance(answer, Exception):
                raise type(answer)(f"rank {rank}: {answer}")

    def result(self, rank: int) -> StepResult:
        """Waits for the result of a step that a rank sends.

        Raises:
            DeviceError: a rank is gone.
        """
        while not self._sockets[rank].poll(_NEWS_S):
            self.check()  # another than this one, which waits for it
        result = self._receive(rank)
        assert isinstance(result, StepResult)
        return result

    def check(self) -> None:
        """
        Raises:
            DeviceError: a rank is gone.
        """
        if self._loss:
            raise DeviceError(self._loss)

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Makes any failure in the block final, for the ranks are no longer at the same place.

        Raises:
            DeviceError: something failed; the message says if a rank is gone.
        """
        try:
            yield
        except Exception as error:
            self._has_loss.wait(_NEWS_S)
            raise DeviceError(self._loss or f"{type(error).__name__}: {error}") from error
        self.check()

    def close(self) -> None:
        """Ends all ranks but this one."""
        self._is_closing = True
        for socket in self._sockets.values():
            socket.close()
        for process in self._started.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._processes is not None:
            self._processes.close()
        self._folder.cleanup()

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        program = _START.format(
            path=sys.path,
            descriptor=theirs.fileno(),
            rank=rank,
            num_ranks=self.grid.num_ranks,
            num_stages=self.grid.num_stages,
            meeting=self._meeting,
            on_cuda=self.grid.on_cuda,
        )
        # In a process group of its own: Ctrl-C is for rank 0, which drains.
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        theirs.close()
        self._sockets[rank], self._started[rank] = ours, process
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Waits for a rank's end, and ends all waits for it on this one."""
        status = process.wait()
        if self._is_closing or self._loss:
            return
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._loss = f"rank {rank} (process {process.pid}) ended with {how}"
        self._has_loss.set()
        if self.grid.on_cuda and self._processes is not None:
            self._processes.abort()  # gloo sees for itself that a socket is closed

    def _receive(self, rank: int) -> object:
        try:
            return self._sockets[rank].recv()
        except (EOFError, OSError) as error:
            self._has_loss.wait(_NEWS_S)
            raise DeviceError(self._loss or f"rank {rank} is gone") from error


class ParallelRunner:
    """Executes plans on all ranks, of which this process is rank 0; see `planning.device.Runner`.

    Args:
        start: starts the other ranks.
        make_runner: makes the runner of this one.
    """

    def __init__(
        self,
        folder: Path,
        options: LoadOptions,
        *,
        start: Callable[[], Followers],
        make_runner: Callable[[World], Runner],
    ) -> None:
        self._load = Load(folder, options)
        self._start = start
        self._make_runner = make_runner
        self._narrator = Narrator()
        self._followers: Followers | None = None
        self._own: Runner

    @property
    def followers(self) -> Followers:
        if self._followers is None:
            raise RuntimeError("the ranks have not been started")
        return self._followers

    def load(self) -> RunnerFacts:
        self._followers = followers = self._start()
        self._own = self._make_runner(followers.world)
        followers.tell(self._load)
        try:
            facts = self._own.load()
        except (CheckpointError, NotEnoughMemory):
            raise
        except Exception:
            followers.wait_loaded(
                _NEWS_S
            )  # a rank that gave up is why, and says more; others wait for this one
            raise
        followers.wait_loaded()
        return facts

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]]:  # noqa: ARG002
        raise AssertionError("a model on several ranks has no draft model")

    def launch(self, plan: StepPlan) -> StepInFlight:
        with self.followers.needed():
            self.followers.tell(self._narrator.launch(plan))
            return _Step(self.followers, plan, self._own.launch(plan))

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """An idle engine calls this, too, with nothing to forget: so it learns that a rank is gone."""
        with self.followers.needed():
            gone = list(sequences)
            if gone:
                self.followers.tell(self._narrator.forget(gone))
                self._own.forget(gone)

    def close(self) -> None:
        if self._followers is not None:
            self._own.close()
            self._followers.close()


class _Step:
    """A step that all ranks have launched."""

    def __init__(self, followers: Followers, plan: StepPlan, own: StepInFlight) -> None:
        self._followers = followers
        self._plan = plan
        self._own = own

    def choose(self) -> None:
        with self._followers.needed():
            self._followers.tell(ChooseTokens(self._plan.masks))
            self._own.choose()

    def wait(self) -> StepResult:
        with self._followers.needed():
            result = self._own.wait()
            chooser = self._followers.grid.chooser
            return self._followers.result(chooser) if chooser else result


class DataParallelRunner(ParallelRunner):
    """Executes plans on ranks each of which has sequences of its own, and some experts for the sequences of all."""

    def load(self) -> RunnerFacts:
        facts = super().load()
        self._num_blocks = facts.num_blocks
        self._narrators = [Narrator(rank * facts.num_blocks) for rank in range(1, facts.num_ranks)]
        self._spread = RowSpread()
        return facts

    def launch(self, plan: StepPlan) -> StepInFlight:
        shared = SharedPlan(plan, 1 + len(self._narrators), self._num_blocks)
        self._spread.add(shared.rows)
        first, *others = shared.plans
        with self.followers.needed():
            self.followers.tell_each(map(Narrator.launch, self._narrators, others))
            own = self._own.launch(first)
            plan.copies = []
            return _SharedStep(self.followers, shared, own, self._spread)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        with self.followers.needed():
            gone = list(sequences)
            if gone:
                self.followers.tell_each(narrator.forget(gone) for narrator in self._narrators)
                self._own.forget(gone)


class _SharedStep:
    """A step of which every rank has launched the chunks of its own sequences."""

    def __init__(
        self, followers: Followers, shared: SharedPlan, own: StepInFlight, spread: RowSpread
    ) -> None:
        self._followers, self._shared, self._own, self._spread = followers, shared, own, spread

    def choose(self) -> None:
        with self._followers.needed():
            self._shared.share_masks()
            self._followers.tell_each(ChooseTokens(plan.masks) for plan in self._shared.plans[1:])
            self._own.choose()

    def wait(self) -> StepResult:
        with self._followers.needed():
            first, others = self._own.wait(), range(1, len(self._shared.plans))
            result = self._shared.merged([first, *map(self._followers.result, others)])
            result.experts = self._spread.told_in(result.experts)
            return result


def make_runner(
    folder: Path,
    options: LoadOptions,
    *,
    start: Callable[[], Followers],
    make_runner: Callable[[World], Runner],
) -> ParallelRunner:
    """The runner of a model on several ranks; see `ParallelRunner`."""
    kind = DataParallelRunner if options.data_parallel_attention else ParallelRunner
    return kind(folder, options, start=start, make_runner=make_runner)
