"""Masks: which tokens may come next, by grammars that llguidance compiled and by what requests rule out.

For each row that is sampled there is a mask of the tokens that are allowed after those before, drafts included. With a
grammar, the end of the sequence is among them exactly where the grammar accepts what there is.

`min_tokens`, and with a grammar `ignore_eos`, hold the end back as long as something else may follow; they cannot hold
up an answer that is complete.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.engine.cores import num_cores
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.step import Chunk, Masks, StepPlan
from penstock.engine.text.bans import Bans, bits_of, without
from penstock.engine.text.grammar import CompiledGrammar, Guide
from penstock.engine.text.grammars import Grammars

if TYPE_CHECKING:
    from llguidance import LLExecutor

_NUM_THREADS = max(1, num_cores() * 4 // 5)
"""Threads that llguidance may use for masks."""


class StepMasks:
    """Computes the masks of steps."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def prepare(self) -> None:
        """Makes ready what takes up to seconds and holds the interpreter; see Grammars.prepare."""
        self._grammars.prepare()

    def of(self, plan: StepPlan) -> Masks | None:
        """The tokens that the rows of a step may bring; None if they may bring any.

        All tokens before them have to be known.
        """
        first: list[int] = []
        guided: list[tuple[Guide, int, Chunk]] = []
        num_rows = 0
        for chunk in plan.chunks:
            guide = self._guide_of(chunk.sequence) if chunk.samples else None
            if guide is None or guide.error:
                first.append(-1)
                continue
            first.append(num_rows)
            guided.append((guide, num_rows, chunk))
            num_rows += 1 + len(chunk.drafts)
        if not guided:
            return None
        masks = Masks(bytearray(4 * self._num_words * num_rows), self._num_words, first)
        self._fill(masks, guided, num_rows)
        for guide, row, chunk in guided:
            self._rule_out(masks, guide, row, chunk)
        return masks

    def _guide_of(self, sequence: Sequence) -> Guide | None:
        if sequence.guide is None and sequence.request.sampling.is_guided:
            sequence.guide = start_guide(sequence.request)
        return sequence.guide

    def _fill(self, masks: Masks, guided: list[tuple[Guide, int, Chunk]], num_rows: int) -> None:
        """Has llguidance compute what grammars allow, without the interpreter's lock.

        Its own threads do it all at once. Where there would be one of them, it would take the work away from the caches
        of this one; then only rows with drafts are for it, which nothing else computes.
        """
        place, size = (
            ctypes.addressof((ctypes.c_char * len(masks.bits)).from_buffer(masks.bits)),
            4 * masks.num_words,
        )
        matched = [
            (guide.matcher, row, chunk.drafts) for guide, row, chunk in guided if guide.matcher is not None
        ]
        plain = [(matcher, row) for matcher, row, drafts in matched if not drafts]
        drafted = [(matcher, row, list(drafts)) for matcher, row, drafts in matched if drafts]
        if _NUM_THREADS == 1:
            for matcher, row in plain:
                matcher.unsafe_compute_mask_ptr(place + row * size, size)
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, place, size, num_rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, place, size, num_rows)
        for guide, _, _ in guided:
            guide.look()

    def _rule_out(self, masks: Masks, guide: Guide, row: int, chunk: Chunk) -> None:
        """Takes what the request rules out, and what would end its sequence too early, out of the rows of a chunk."""
        sequence, bans = chunk.sequence, guide.bans
        params, number = sequence.request.sampling, sequence.num_output_tokens
        if bans is None and number >= params.min_tokens and not params.ignore_eos:
            return
        size, before = 4 * masks.num_words, [*guide.before, *chunk.drafts]
        for num_drafts in range(1 + len(chunk.drafts)):
            place = slice((row + num_drafts) * size, (row + num_drafts + 1) * size)
            tokens = self._all if guide.matcher is None else int.from_bytes(masks.bits[place], "little")
            if bans is not None:
                tokens = bans.kept(tokens, before[: len(guide.before) + num_drafts])
            tokens = without(tokens, bits_of(self._ending(params, number + num_drafts)))
            masks.bits[place] = tokens.to_bytes(size, "little")
            if not tokens and not num_drafts:
                guide.error = guide.error or "no token is allowed by both the grammar and 'allowed_token_ids'"

    def _ending(self, params: SamplingParams, number: int) -> Iterable[int]:
        """The tokens that may not come after `number` output tokens, as long as another token may."""
        eos = self._grammars.eos_token_ids if params.grammar is not None or not params.ignore_eos else ()
        if number < params.min_tokens:
            return params.stop_token_ids.union(eos)
        return eos if params.ignore_eos else ()

    @cached_property
    def _all(self) -> int:
        """The set of all tokens."""
        return (1 << self._grammars.vocab_size) - 1

    @cached_property
    def _num_words(self) -> int:
        return -(-self._grammars.vocab_size // 32)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(_NUM_THREADS)


def start_guide(request: Request) -> Guide:
    """The guide of a request's sequence, after the output tokens that are known already.

    Nothing is compiled here, on the step thread: a grammar that is not compiled yet is an error of its sequence.
    """
    params, matcher, bans, error = request.sampling, None, None, ""
    if isinstance(params.grammar, CompiledGrammar):
        matcher = params.grammar.matcher.deep_copy()
    elif params.grammar is not None:
        error = "the grammar was not compiled"
    if params.allowed_token_ids or params.bad_words:
        bans = Bans(params.allowed_token_ids, params.bad_words)
    guide = Guide(matcher, bans, error)
    for token_id in request.output_token_ids:
        guide.advance(token_id)
    return guide


class ForcedTokens:
    """Proposes the tokens that a grammar forces, such as the names of members; see `planning.drafting.Proposer`."""

    name = "grammar"
    is_behind = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        return [
            [] if sequence.guide is None else sequence.guide.forced()[:length]
            for sequence, length in zip(sequences, lengths, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Does nothing: it holds nothing of a sequence."""
