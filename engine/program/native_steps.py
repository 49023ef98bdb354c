"""Plain steps with the native kernels: one call each, run concurrently with the host, one after another."""

from __future__ import annotations

import ctypes
from ctypes import c_int32

from penstock.engine.kernels.cpu.library import Team, check, created, freed_with
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.cpu.sampling import NativeChoose
from penstock.engine.kernels.sequence_table import SequenceTable, TableStep
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.native_tables import sent, tables_of
from penstock.engine.sampling.tables import Filters, SamplingTables


class NativeSteps:
    """Runs steps in which every sequence computes the token that it sampled last and its drafts, and chooses the next.

    Such a step runs `Gather`, the decoder, the output head and `Choose` over the table, which then has the last token
    of each sequence as its last one. A row's token is not counted for the penalties of the next row of its sequence. A
    step runs on threads that need no GIL, after those launched before. Until `drain` has returned, nothing else may use
    the table, the sampling tables, the decoder or its KV cache. Calls must come from one thread at a time.

    Args:
        table: has the block tables of the decoder's KV cache.
        choose: is used by nothing else.
    """

    def __init__(
        self,
        team: Team,
        decoder: NativeDecoder,
        lm_head: NativeLinear,
        choose: NativeChoose,
        table: SequenceTable,
        tables: SamplingTables,
    ) -> None:
        made = tables_of(decoder, lm_head, choose, table, tables)
        self._kept = (team, decoder, lm_head, choose, table, tables)
        handles = team.handle, decoder.handle, lm_head.handle, choose.handle
        library = team.library
        self._handle = created(library.call("penstock_steps_new", *handles, ctypes.byref(made)))
        freed_with(self, library, "penstock_steps_free", self._handle)
        self._put = library.function("penstock_steps_put")
        self._run = library.function("penstock_steps_run")
        self._wait = library.function("penstock_steps_wait")
        self._drain = library.function("penstock_steps_drain")

    def launch(self, step: TableStep, filters: Filters) -> NativeStep:
        """Launches a step; the host's part of its input is copied now."""
        number = self._put(self._handle, ctypes.byref(sent(step, filters)))
        if not number:
            raise MemoryError("the native kernels could not get their memory")
        return NativeStep(self, number, len(step.token_ids))

    def run(self, step: TableStep, filters: Filters) -> list[int]:
        """Runs a step on this thread, after all that were launched; see `NativeStep.wait`."""
        token_ids = (c_int32 * len(step.token_ids))()
        check(self._run(self._handle, ctypes.byref(sent(step, filters)), token_ids))
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
            ValueError: a seat does not exist, or its entries in the table are invalid.
        """
        return self._steps.wait(self._number, self._num)
