"""The arguments of native steps that need almost nothing from the host but words."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int32, c_void_p
from itertools import chain

from torch import Tensor

from penstock.engine.kernels.cpu.decoder import NativeDecoder
from penstock.engine.kernels.cpu.library import expect_ints, fields, pointer
from penstock.engine.kernels.cpu.linear import PackedLinear
from penstock.engine.kernels.cpu.sampling import ChooseArguments, NativeChoose
from penstock.engine.kernels.sequence_table import SequenceTable, TableStep
from penstock.engine.sampling.tables import Filters, SamplingTables


class StepTables(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "words lengths prompt_lens last_tokens block_tables"),
        *fields(c_int32, "num_rows max_blocks num_tables width"),
        ("choose", ChooseArguments),
        ("choosable", c_void_p),
        ("num_choosable", c_int32),
    ]


class SentStep(ctypes.Structure):
    _fields_ = [
        ("words", c_void_p),
        *fields(c_int32, "num_sequences num_tokens num_changes num_blocks top_k top_p has_states num_saves"),
    ]


def tables_of(
    decoder: NativeDecoder,
    lm_head: PackedLinear,
    choose: NativeChoose,
    table: SequenceTable,
    tables: SamplingTables,
    choosable: Tensor | None = None,
) -> StepTables:
    """Returns the arguments that all steps of a model have in common; they point into the tables.

    Args:
        choosable: int32, the tokens whose logits lm_head makes, each once; None for all.

    Raises:
        ValueError: the head does not fit the decoder, or makes logits of ids that are no tokens.
    """
    num_logits, vocab = lm_head.out_features, tables.vocab_size
    if lm_head.in_features != decoder.hidden_size or (choosable is None and num_logits != vocab):
        raise ValueError(f"a head of {vocab} logits expected, not {num_logits}")
    if choosable is not None:
        expect_ints("choosable", choosable, (num_logits,))
        if not 0 <= int(choosable.min()) <= int(choosable.max()) < vocab:
            raise ValueError(f"logits of tokens beyond a vocabulary of {vocab}")
    columns = (table.words, table.lengths, table.prompt_lens, table.last_tokens, table.block_tables)
    return StepTables(
        *(column.data_ptr() for column in columns),
        table.num_rows,
        table.max_blocks,
        table.num_tables,
        decoder.hidden_size,
        choose.arguments_of(tables),
        pointer(choosable),
        num_logits,
    )


def sent(step: TableStep, filters: Filters) -> SentStep:
    """The step as the kernels read it, with its words."""
    states = step.state_slots, step.state_saves
    words = array("i", chain(step.slots, step.starts, step.token_ids, step.places, step.values, *states))
    counts = len(step.slots), len(step.token_ids), len(step.places), step.num_blocks
    has_states, num_saves = bool(step.state_slots), len(step.state_saves) // 4
    made = SentStep(words.buffer_info()[0], *counts, filters.top_k, filters.top_p, has_states, num_saves)
    made.kept = words
    return made
