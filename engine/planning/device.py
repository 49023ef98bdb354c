"""The device that runs steps, as planning and the step thread see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.step import StepPlan, StepResult


class DeviceError(RuntimeError):
    """The device is lost: nothing that runs on it can be saved."""


class OutOfMemory(RuntimeError):
    """The device had no room for this step; a smaller one may fit."""


class StepInFlight(Protocol):
    """A step whose pass through the model was launched."""

    def choose(self) -> None:
        """Launches the choice of the step's tokens from its logits; whatever limits the choice must be known by now.

        Called once, before the next step is launched.

        Raises:
            OutOfMemory: nothing was chosen; the step may be launched again, as a smaller one.
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """

    def wait(self) -> StepResult:
        """Waits until the step has ended, and returns its results. Called once, in the order of launches.

        Raises:
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """


Payload = bytes | bytearray | memoryview
"""The content of a block, or of a state slot; nobody changes it."""


class Staged(Protocol):
    """Contents of pages on their way to the host."""

    def wait(self) -> list[Payload]:
        """Waits until they have come, and returns the content of each page. Called once, from any thread."""


class PageCarrier(Protocol):
    """Carries contents of pages, which are KV blocks or state slots, from the device to the host and back. Every call
    comes from the step thread.

    What it does to a page happens after the steps that were launched before, and before those that are launched later.
    """

    num_bytes: int
    """The bytes of a page's content."""
    layout: str
    """What has to be equal for the contents of two runners' pages to mean the same, apart from the weights."""

    def copy_out(self, pages: list[int]) -> Staged:
        """Raises OutOfMemory if there is no room for that on the host."""

    def copy_in(self, pages: list[int], payloads: list[Payload]) -> None:
        """Overwrites distinct pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """The facts of a runner that planning has to know."""

    num_blocks: int
    """KV blocks in the pool, block 0 included."""
    block_size: int
    """Tokens per block."""
    max_batch_tokens: int
    """Tokens of the largest step."""
    num_ahead: int = 0
    """Steps that may be launched while an earlier one has not been waited for."""
    num_stages: int = 1
    """The stages that a step goes through, each of which may run another step. With several, none may compute a token
    that a step in flight is to bring: the stages before the last do not know it."""
    plain_ahead_s: float | None = None
    """If given, none but plain steps run beside the host, and none that is expected to take longer: who arrives while
    one runs may have to wait for the next one, too."""
    max_model_len: int = NO_LIMIT
    """Tokens of the longest sequence that it has positions for."""
    windows: tuple[int, ...] = (0,)
    """The tokens that a token sees, by block table of a sequence; 0 if it sees all of them."""
    max_drafts: int = 0
    """Drafts that a chunk may have."""
    max_rows: int = NO_LIMIT
    """Chunks and drafts that a step with drafts may have."""
    max_scored: int = NO_LIMIT
    """Tokens of prompts that a step scores at most while other sequences run."""
    has_draft_model: bool = False
    """Whether there is a model that makes drafts."""
    drafts_ahead: bool = False
    """Whether it makes them of tokens that the host does not know yet: then a step may be launched before one with
    drafts has come back."""
    num_states: int = 0
    """State slots, slot 0 included; 0 if no layer has a state."""
    num_pending: int = 0
    """The pending rows that a state slot has room for."""
    has_experts: bool = False
    """Whether tokens choose among experts, so that each token more of a step adds less time."""
    num_ranks: int = 1
    """The ranks that have sequences of their own, and `num_blocks` each. Each rank's blocks have the numbers after
    those of the rank before."""
    carrier: PageCarrier | None = None
    """Carries contents of blocks; None where a block's content is in several places."""
    state_carrier: PageCarrier | None = None
    """Carries contents of state slots; given together with `carrier` where layers have a state."""


class Runner(Protocol):
    """Execution, as the engine's step thread sees it. Every call comes from that one thread."""

    def load(self) -> RunnerFacts:
        """Loads the weights, allocates the KV cache and warms up."""

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        """Has the draft model make the drafts of a plan that are open; called before the plan is launched.

        If a step is in flight, the drafts follow the tokens that it brings, and stay on the device.

        Args:
            may_stay: nobody has to know the drafts before the step has landed.

        Returns:
            By open chunk, its drafts: at most as many as are open; none while more of the sequence is to be read than
            fits into a pass. None if all of them stay on the device: the plan is to be launched with chunks that are
            open, and its result has the drafts.

        Raises:
            Exception: there are no drafts; the step itself may work.
        """

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Launches the pass of one step. It runs after the steps launched before, and sees their writes.

        The plan's sequences may change as soon as the step's tokens are chosen; what the step needs of them was taken
        by then. Block copies that were made are taken off the plan, so that they are made once.

        Raises:
            OutOfMemory: nothing that later steps need was changed.
            DeviceError: the device is lost.
            Exception: this step failed, the next may work.
        """

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Frees the runner's state of these sequences, which ended or were preempted."""

    def close(self) -> None:
        """Frees everything that the runner holds."""
