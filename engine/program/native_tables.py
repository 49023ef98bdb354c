"""The arguments of native steps that need almost nothing from the host but words."""

from __future__ import annotations

from array import array
from itertools import chain

from torch import Tensor

from penstock.engine.kernels.cpu import structs
from penstock.engine.kernels.cpu.library import expect_ints, pointer
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.cpu.sampling import NativeChoose
from penstock.engine.kernels.sequence_table import SequenceTable, TableStep
from penstock.engine.program.native import NativeDecoder
from penstock.engine.sampling.tables import Filters, SamplingTables


def tables_of(
    decoder: NativeDecoder,
    lm_head: NativeLinear,
    choose: NativeChoose,
    table: SequenceTable,
    tables: SamplingTables,
    choosable: Tensor | None = None,
) -> structs.StepTables:
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
    columns = (
        *(table.words, table.lengths, table.prompt_lens),
        *(table.last_tokens, table.dropped, table.block_tables),
    )
    return structs.StepTables(
        *(column.data_ptr() for column in columns),
        table.num_rows,
        table.max_blocks,
        table.num_tables,
        decoder.hidden_size,
        choose.arguments_of(tables),
        pointer(choosable),
        num_logits,
    )


def sent(step: TableStep, filters: Filters) -> structs.TableStep:
    """The step as the kernels read it, with its words."""
    states = step.state_slots, step.state_saves
    words = array("i", chain(step.seats, step.starts, step.token_ids, step.places, step.values, *states))
    counts = len(step.seats), len(step.token_ids), len(step.places), step.num_blocks
    has_states, num_saves = bool(step.state_slots), len(step.state_saves) // 4
    made = structs.TableStep(
        words.buffer_info()[0], *counts, filters.top_k, filters.top_p, has_states, num_saves
    )
    made.kept = words
    return made
