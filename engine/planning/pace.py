"""Decides whether drafts pay, by their expected gain and the measured time of steps with them."""

from __future__ import annotations

from collections import deque
from enum import Enum
from math import ceil
from statistics import median

_PAIRS = 8
"""The steps with drafts of a trial, each next to a step without, and the steps remembered of either kind."""
_ENOUGH = 4
"""Measured steps without which nothing is said of the time that drafts take."""
_KEPT_STEPS = 32
"""Steps with drafts, while they pay, before there is one without."""
_SHORTEST_REST, _LONGEST_REST = 16, 1024
"""Steps without drafts after a trial in which they did not pay; twice as many after each such trial in a row."""
_MOST_BEHIND = 256
"""Steps of a turn that are not measured because a proposer has yet to read what it proposes from."""
_PAYS, _LOSES = 1.03, 1.0
"""Relative tokens a second: at the first a trial is won, and below the second another trial begins."""
_FADING = 0.875
"""The weight of a step with drafts in the next one's sums."""
_LOOK_COST = 0.005
"""The share of the time that looking what drafts would bring may take while they rest."""
_MOST_BETWEEN_LOOKS = 16


class _State(Enum):
    RESTS = "rests"
    IS_TRIED = "is tried"
    PAYS = "pays"


class Pace:
    """Decides whether steps of about so many sequences have drafts.

    What drafts bring is known without computing any: proposals are compared with what came. What they take, the model
    of step times says, but for what it does not know: looking for drafts, verifying them, and on a device the wait for
    the host, which has to know what drafts follow. So while they rest, somebody looks now and then; where they promise
    to pay there is a trial, in which steps with them and without take turns; and while they pay there is a step without
    now and then. Times are compared in units of what the model says of each step, and by their medians: what else the
    machine does slows neighbours of both kinds, and what slows a few steps changes nothing.
    """

    def __init__(self, *, block: int = 1, is_watched: bool = False) -> None:
        """
        Args:
            block: steps of one kind in a row. If more than one, the first is not measured: a device without drafts is a
                step ahead of the host.
            is_watched: whether somebody looks what drafts would bring while they rest; else there is a trial after
                each rest.
        """
        self.drafts = False
        """Whether the next step may have drafts."""
        self.turn = 0
        """Turns are numbered. A step that was planned in one and ends in the next says nothing of either."""
        self._block, self._is_watched = block, is_watched
        self._state = _State.RESTS
        self._left = 0
        """Steps to measure until the turn ends, or the rest."""
        self._num_lost = 0
        """Trials in a row in which drafts did not pay."""
        self._num_drafted = 0
        """Steps with drafts that were measured in this trial."""
        self._is_first = False
        """The next step is the first of a turn, which is not measured."""
        self._num_behind = 0
        """Steps of this turn in which proposers caught up."""
        self._plain, self._drafted = (deque[float](maxlen=_PAIRS) for _ in range(2))
        """The times of recent steps divided by the expected times, by kind of step."""
        self._worth_s = self._cost_s = 0.0
        """For recent steps with drafts: the time of their tokens without drafts, and the modelled time of the steps."""
        self._until_look = 0
        self._between_looks = 1

    @property
    def pays(self) -> bool:
        """Whether drafts are known to pay, and not only tried."""
        return self._state is _State.PAYS

    @property
    def overhead(self) -> float:
        """Returns the relative time of steps with drafts, divided by that of steps without."""
        if min(len(self._plain), len(self._drafted)) < _ENOUGH:
            return 1.0
        drafted, plain = (max(median(times), 1e-9) for times in (self._drafted, self._plain))
        return drafted / plain

    @property
    def slowness(self) -> float:
        """Returns the measured time of steps without drafts divided by the expected time."""
        return median(self._plain) if len(self._plain) >= _ENOUGH else 1.0

    @property
    def gain(self) -> float:
        """Returns the tokens a second of recent steps with drafts, relative to those without."""
        return self._worth_s / max(self._cost_s * self.overhead, 1e-9)

    def begin_paying(self) -> None:
        """Takes for granted that drafts pay, until that is seen to be wrong."""
        self._num_lost = 0
        self._state = _State.PAYS
        self._begin_turn(drafts=True, num_steps=self._block * _KEPT_STEPS)

    # While they rest

    def is_look_due(self) -> bool:
        """Returns whether it is time to check the gain of drafts; called once a step."""
        if self._state is not _State.RESTS or not self._is_watched or self._left > _MOST_BETWEEN_LOOKS:
            return False
        self._until_look -= 1
        return self._until_look < 0

    def note_outlook(self, gain: float, look_s: float, plain_s: float) -> None:
        """Notes the result of such a check.

        Args:
            gain: the tokens a second that drafts promise, in units of those without.
            look_s: what it took to look.
            plain_s: what a step takes.
        """
        self._between_looks = min(max(1, ceil(look_s / (_LOOK_COST * plain_s))), _MOST_BETWEEN_LOOKS)
        self._until_look = self._between_looks - 1
        if gain >= _PAYS and self._left <= 0:
            self._try()

    # What steps took

    def observe(
        self,
        num_sequences: int,
        num_tokens: int,
        *,
        plain_s: float,
        modelled_s: float,
        seconds: float,
        is_behind: bool = False,
    ) -> None:
        """A step of this turn brought so many tokens.

        Args:
            plain_s: what the model expected of it without drafts.
            modelled_s: what the model expected of it as it was.
            seconds: what it took.
        """
        if self._is_first:
            self._is_first = False
            return
        if is_behind and self._num_behind < _MOST_BEHIND:
            self._num_behind += 1
            return
        (self._drafted if self.drafts else self._plain).append(seconds / max(modelled_s, 1e-9))
        if self.drafts:
            self._num_drafted += 1
            self._worth_s = _FADING * self._worth_s + num_tokens * plain_s / num_sequences
            self._cost_s = _FADING * self._cost_s + modelled_s
        self._left -= 1
        if self._left <= 0:
            self._go_on()

    def _go_on(self) -> None:
        """A turn has ended, or a rest."""
        match self._state:
            case _State.RESTS:
                self._drafted.clear()  # what they took then says nothing of the next trial
                if not self._is_watched:
                    self._try()
            case _State.IS_TRIED if self._num_drafted >= _PAIRS:
                self._decide()
            case _State.IS_TRIED:
                self._begin_turn(drafts=not self.drafts, num_steps=self._block)
            case _State.PAYS if self.drafts:
                self._begin_turn(drafts=False, num_steps=self._block)
            case _State.PAYS if self.gain < _LOSES:
                self._try()
            case _State.PAYS:
                self._begin_turn(drafts=True, num_steps=self._block * _KEPT_STEPS)

    def _try(self) -> None:
        self._state, self._num_drafted = _State.IS_TRIED, 0
        self._worth_s = self._cost_s = 0.0
        self._drafted.clear()
        self._begin_turn(drafts=True, num_steps=self._block)

    def _decide(self) -> None:
        """The trial is over."""
        if self.gain >= _PAYS:
            self.begin_paying()
            return
        self._state = _State.RESTS
        self._begin_turn(drafts=False, num_steps=min(_SHORTEST_REST << self._num_lost, _LONGEST_REST))
        self._num_lost = min(self._num_lost + 1, 16)

    def _begin_turn(self, *, drafts: bool, num_steps: int) -> None:
        self.drafts, self._left = drafts, num_steps
        self._is_first, self._num_behind = self._block > 1, 0
        self.turn += 1
