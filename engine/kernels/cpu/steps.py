"""Plain steps with the native kernels: one call each, run behind the host, one after another."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from itertools import chain

from engine.kernels.cpu.decoder import NativeDecoder
from engine.kernels.cpu.library import Team, check, created, fields, freed_with
from engine.kernels.cpu.linear import PackedLinear
from engine.kernels.cpu.sampling import ChooseArguments, NativeChoose
from engine.kernels.sequence_table import SequenceTable
from engine.sampling.tables import Filters, SamplingTables


class _Tables(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "words lengths prompt_lens last_tokens block_tables"),
        *fields(c_int32, "num_rows max_blocks num_tables width"),
        ("choose", ChooseArguments),
    ]


@dataclass(slots=True)
class PlainStep:
    """What the host sends for a step whose sequences compute the token that they sampled last, and their drafts."""

    slots: Sequence[int]
    num_blocks: int
    """No sequence has more, in all its tables."""
    filters: Filters
    places: Sequence[int] = ()
    """Words of the table that get new values when the step begins, after the steps before it."""
    values: Sequence[int] = ()
    drafts: Sequence[Sequence[int]] = ()
    """Of each sequence, the tokens behind the one that it sampled last; empty if none has any."""

    @property
    def num_rows(self) -> int:
        return len(self.slots) + sum(map(len, self.drafts))


class _PlainStep(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "slots places values counts drafts"),
        *fields(c_int32, "num_sequences num_changes num_blocks top_k top_p"),
    ]

    @classmethod
    def of(cls, step: PlainStep) -> _PlainStep:
        sent = [array("i", part) for part in (step.slots, step.places, step.values)]
        if step.drafts:
            sent += [array("i", map(len, step.drafts)), array("i", chain.from_iterable(step.drafts))]
        addresses = [part.buffer_info()[0] for part in sent] + ([] if step.drafts else [None, None])
        made = cls(
            *addresses,
            len(step.slots),
            len(step.places),
            step.num_blocks,
            step.filters.top_k,
            step.filters.top_p,
        )
        made.kept = sent
        return made


class NativeSteps:
    """Runs steps in which every sequence computes the token that it sampled last and its drafts, and chooses the next.

    Such a step is what `Gather`, the decoder, the output head and `Choose` make of the table, which then has the last
    token of each sequence as its last one. A row's token is not counted for the penalties of the next row of its
    sequence. A step runs on threads that need no GIL, after those launched before. Until `drain` has returned, nobody
    else may use the table, the sampling tables, the decoder or its KV cache. Calls must come from one thread at a time.

    Args:
        table: has the block tables of the decoder's KV cache.
        choose: is used by nobody else.
    """

    def __init__(
        self,
        team: Team,
        decoder: NativeDecoder,
        lm_head: PackedLinear,
        choose: NativeChoose,
        table: SequenceTable,
        tables: SamplingTables,
    ) -> None:
        if lm_head.out_features != tables.vocab_size or lm_head.in_features != decoder.hidden_size:
            raise ValueError(f"a head of {tables.vocab_size} logits expected, not {lm_head.out_features}")
        self._kept = (team, decoder, lm_head, choose, table, tables)
        columns = (table.words, table.lengths, table.prompt_lens, table.last_tokens, table.block_tables)
        made = _Tables(
            *(column.data_ptr() for column in columns),
            table.num_rows,
            table.max_blocks,
            table.num_tables,
            decoder.hidden_size,
            choose.arguments_of(tables),
        )
        handles = team.handle, decoder.handle, lm_head.handle, choose.handle
        library = team.library
        self._handle = created(library.call("penstock_steps_new", *handles, ctypes.byref(made)))
        freed_with(self, library, "penstock_steps_free", self._handle)
        self._put = library.function("penstock_steps_put")
        self._run = library.function("penstock_steps_run")
        self._wait = library.function("penstock_steps_wait")
        self._drain = library.function("penstock_steps_drain")

    def launch(self, step: PlainStep) -> NativeStep:
        """Launches a step; what it needs of the host is taken now."""
        number = self._put(self._handle, ctypes.byref(_PlainStep.of(step)))
        if not number:
            raise MemoryError("the native kernels could not get their memory")
        return NativeStep(self, number, step.num_rows)

    def run(self, step: PlainStep) -> list[int]:
        """Runs a step on this thread, after all that were launched; see `NativeStep.wait`."""
        token_ids = (c_int32 * step.num_rows)()
        check(self._run(self._handle, ctypes.byref(_PlainStep.of(step)), token_ids))
        return token_ids[:]

    def wait(self, number: int, num: int) -> list[int]:
        """The tokens of a step; see `NativeStep.wait`."""
        token_ids = (c_int32 * num)()
        check(self._wait(self._handle, number, token_ids))
        return token_ids[:]

    def drain(self) -> None:
        """Waits until every step that was launched has ended."""
        self._drain(self._handle)


class NativeStep:
    """A step that was launched."""

    def __init__(self, steps: NativeSteps, number: int, num: int) -> None:
        self._steps, self._number, self._num = steps, number, num

    def wait(self) -> list[int]:
        """Waits until it has ended; the token of each row, -1 where no logit was finite. Called once.

        Raises:
            MemoryError: there was not enough for it.
            ValueError: a slot does not exist, or what the table says of it cannot be.
        """
        return self._steps.wait(self._number, self._num)
