"""Beam search: the likeliest answers as a whole.

A search keeps `width` beams, the likeliest beginnings of one length. Each step tells what may follow each of them; the
likeliest of all continuations are the next beams. One that ends is an answer if it is among the best `width` of its
step. Scores and ends are those of transformers' `generate(num_beams=width, do_sample=False)`.

Every beam is a Sequence. After each step new ones, which share the blocks of those that they continue, take the place
of all that there were. They run and give way together: what is left of those that gave way is one sequence, of the
tokens that all of them begin with, and the beams fork from it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import takewhile

from penstock.engine.planning.params import BeamParams
from penstock.engine.planning.request import FinishReason, Request, Sequence, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an answer, or all of it."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    """The sum of its log probabilities; of an answer, with the length penalty."""
    logprobs: list[TokenLogprobs] | None = None
    """The log probabilities of its tokens, if they are wanted."""


class BeamSearch:
    """The search itself, which knows nothing of sequences.

    Args:
        max_tokens: the most tokens of an answer.
        num_logprobs: likely tokens that are kept for each token of an answer; None if no log probabilities are.
    """

    def __init__(
        self, width: int, params: BeamParams, max_tokens: int, num_logprobs: int | None = None
    ) -> None:
        self.width = width
        self.beams = [Beam(logprobs=None if num_logprobs is None else [])]
        """The best one first; all have the same length."""
        self.finished: list[Beam] = []
        """The best answers so far, the best one first, as many as there are beams at most."""
        self.is_over = False
        self._params = params
        self._max_tokens = max_tokens
        self._num_logprobs = num_logprobs

    def advance(self, rows: list[TokenLogprobs]) -> list[int]:
        """Takes a step.

        Args:
            rows: by beam, its likeliest continuations, best first: as many as there are beams and tokens that end an
                answer, or all.

        Returns:
            By new beam, the number of the one that it continues.
        """
        ends, before = self._params.end_token_ids, self.beams
        found = [
            (before[number].score + logprob, number, token_id, logprob)
            for number, row in enumerate(rows)
            for token_id, logprob in row.top
        ]
        found.sort(key=lambda candidate: -candidate[0])
        length = len(before[0].token_ids) + 1
        is_last = length >= self._max_tokens
        for score, number, token_id, logprob in found[: self.width]:
            if is_last or token_id in ends:
                penalised = score / math.pow(length, self._params.length_penalty)
                self.finished.append(self._longer(before[number], token_id, penalised, logprob, rows[number]))
        self.finished.sort(key=lambda answer: -answer.score)
        del self.finished[self.width :]
        going = (
            [] if is_last else [candidate for candidate in found if candidate[2] not in ends][: self.width]
        )
        self.beams = [
            self._longer(before[number], token_id, score, logprob, rows[number])
            for score, number, token_id, logprob in going
        ]
        self.is_over = not going or self._is_settled(length)
        return [number for _, number, _, _ in going]

    def _longer(self, beam: Beam, token_id: int, score: float, logprob: float, row: TokenLogprobs) -> Beam:
        told = None
        if beam.logprobs is not None:
            told = [*beam.logprobs, TokenLogprobs(logprob, row.top[: self._num_logprobs])]
        return Beam((*beam.token_ids, token_id), score, told)

    def _is_settled(self, length: int) -> bool:
        """Returns whether there are enough answers, and no beam can still become a better one."""
        if len(self.finished) < self.width:
            return False
        penalty, early = self._params.length_penalty, self._params.early_stopping
        if early is True:
            return True
        hoped_for = self._max_tokens if early == "never" and penalty > 0 else length
        hoped = self.beams[0].score / math.pow(hoped_for, penalty)
        return hoped <= self.finished[-1].score


class Beams:
    """A search with its sequences, which are in the engine's hands."""

    def __init__(self, request: Request, params: BeamParams, max_len: int) -> None:
        """`max_len` bounds prompt and output tokens of an answer, whatever the request asks for."""
        self.width = request.n
        self._request, self._max_len = request, max_len
        most = self._new_answer(0).max_len - len(request.prompt_token_ids)
        self.search = BeamSearch(request.n, params, most, request.sampling.num_logprobs)
        self.members = [BeamSequence(self, request)]
        """The sequence of each beam, the best one first; a single one if the beams are still to fork from it."""
        self._rows: dict[BeamSequence, TokenLogprobs] = {}

    @property
    def num_seats_kept(self) -> int:
        """The seats that are kept for the beams that are still to fork from a running sequence."""
        return self.width - len(self.members) if self.members[0].block_table else 0

    def note(self, member: BeamSequence, row: TokenLogprobs) -> None:
        """Keeps the likeliest continuations of a member."""
        self._rows[member] = row

    @property
    def is_due(self) -> bool:
        """Whether the continuations of all members are known."""
        return len(self._rows) == len(self.members)

    def advance(self) -> list[tuple[BeamSequence, BeamSequence]]:
        """Makes the next members, each with the one that it continues; none if the search is over."""
        before = self.members
        if len(self.search.beams) > len(before):  # they gave way
            parents = [0] * len(self.search.beams)
        else:
            parents = self.search.advance([self._rows[member] for member in before])
        self._rows = {}
        if self.search.is_over:
            return []
        self.members = [
            before[parent].heir(number, beam.token_ids)
            for number, (parent, beam) in enumerate(zip(parents, self.search.beams, strict=True))
        ]
        return [(before[parent], heir) for parent, heir in zip(parents, self.members, strict=True)]

    def fold(self) -> BeamSequence:
        """Makes the one member that is left when all give way."""
        for member in self.members:
            member.finish_reason = FinishReason.CANCELLED  # what a step in flight brings for it is dropped
        places = zip(*(beam.token_ids for beam in self.search.beams), strict=True)
        common = [token_ids[0] for token_ids in takewhile(lambda place: len(set(place)) == 1, places)]
        self._rows = {}
        self.members = [self.members[0].heir(0, common)]
        return self.members[0]

    def answer(self, index: int) -> Sequence:
        """A sequence for an answer that was found; it has the prompt."""
        answer = self._new_answer(index)
        answer.inherit(self.members[0])
        return answer

    def _new_answer(self, index: int) -> Sequence:
        return Sequence(self._request, index, max_len=self._max_len)


class BeamSequence(Sequence):
    """The sequence of a beam. It ends with its next token, which the search chooses."""

    __slots__ = ("beams",)

    def __init__(
        self, beams: Beams, request: Request, index: int = 0, order: int = 0, token_ids: ListLike[int] = ()
    ) -> None:
        super().__init__(request, index, order)
        self.beams = beams
        self.token_ids += token_ids
        self.horizon = len(self.token_ids) + 1

    def heir(self, index: int, token_ids: ListLike[int]) -> BeamSequence:
        heir = BeamSequence(self.beams, self.request, index, self.order, token_ids)
        heir.inherit(self)
        return heir

    @property
    def together(self) -> ListLike[Sequence]:
        return self.beams.members

    @property
    def num_seats(self) -> int:
        return self.beams.width

    def give_way(self) -> Sequence:
        return self.beams.fold()
