"""Sampler: what its tables hold of sequences that come, go on and end."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.hashing import split_mix
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.sampling import reference
from penstock.engine.sampling.noise import noise_keys
from penstock.engine.sampling.sampler import Sampler, has_penalties
from penstock.engine.sampling.tables import GRAPH_FILTERS, ROW, Filters, SamplingTables
from tests.engine.sampling import numpy_reference
from tests.engine.sampling.cases import (
    CPU,
    EOS,
    PARAMS,
    ROWS,
    TOKENS,
    VOCAB,
    assert_by_hand,
    choose_next,
    holding,
    make_logits,
    make_sampler,
    make_sequence,
    sample,
)
from tests.few import examples

NOTHING = Filters(top_k=False, top_p=False)


def written(sampler: Sampler, seat: int) -> np.void:
    """The seat's row of parameters."""
    row: np.void = sampler.tables.rows[seat].numpy().view(ROW)[0]
    return row


def biases(sampler: Sampler, seat: int) -> dict[int, float]:
    entries = sampler.tables.biases[seat, : int(written(sampler, seat)["num_biases"])].numpy()
    values = np.ascontiguousarray(entries[:, 1]).view(np.float32)
    return dict(zip(entries[:, 0].tolist(), values.tolist(), strict=True))


@given(PARAMS, st.integers(0, 5))
@settings(max_examples=examples(60))
def test_a_row_holds_what_was_asked_for(params: dict[str, Any], index: int) -> None:
    sampler = make_sampler(3)
    sampler.assign(2, make_sequence(params, [1], [1], index))
    row, asked = written(sampler, 2), SamplingParams(**params)
    assert row["state"] == split_mix(asked.seed, index)
    assert row["temperature"] == np.float32(asked.temperature)
    assert row["top_p"] == np.float32(asked.top_p)
    assert row["top_k"] == min(asked.top_k, VOCAB)
    assert row["min_tokens"] == asked.min_tokens
    assert np.exp(-row["min_p_depth"]) == pytest.approx(asked.min_p)
    assert row["repetition"] == np.float32(asked.repetition_penalty)
    assert row["presence"] == np.float32(asked.presence_penalty)
    assert row["frequency"] == np.float32(asked.frequency_penalty)
    assert row["counts_row"] == (2 if has_penalties(asked) else -1)
    assert not sampler.tables.rows[0].any() or written(sampler, 0)["counts_row"] == -1


def test_a_field_is_read_where_it_is_written() -> None:
    tables = SamplingTables(2, VOCAB, 1, 2, CPU)
    row = np.zeros(1, ROW)
    for value, name in enumerate(ROW.names or (), 1):
        row[name] = value
    tables.rows[1] = torch.from_numpy(row.view(np.uint8))
    assert [tables.column(name)[1].item() for name in ROW.names or ()] == [*range(1, len(row[0]) + 1)]
    assert tables.column("state").dtype == torch.int64
    assert {tables.column(name).dtype for name in ("top_p", "frequency")} == {torch.float32}
    assert {tables.column(name).dtype for name in ("top_k", "counts_row")} == {torch.int32}
    assert tables.view(torch.float32).shape == (2, ROW.itemsize // 4)
    assert tables.column("counts_row")[0] == -1


def test_graphs_are_captured_for_all_filters_that_change_tokens() -> None:
    assert len({(filters.top_k, filters.top_p) for filters in GRAPH_FILTERS}) == 4


@given(st.lists(TOKENS, max_size=9), st.lists(TOKENS, max_size=9))
@settings(max_examples=examples(50))
def test_counts_are_of_the_output_and_marks_of_the_prompt(prompt: list[int], output: list[int]) -> None:
    counts = Counter(output)
    for params, is_marked in (({"repetition_penalty": 1.1}, True), ({"presence_penalty": 1.1}, False)):
        sampler = holding([make_sequence(params, prompt, output)])
        expected = [2 * counts[token] + (is_marked and token in prompt) for token in range(VOCAB)]
        assert sampler.tables.counts[0].tolist() == expected


def test_many_distinct_tokens_are_all_counted() -> None:
    output = [i % 300 for i in range(900)] + [7]
    sampler = holding([make_sequence({"presence_penalty": 1.0}, [], output)], vocab=300)
    counts = dict(enumerate((sampler.tables.counts[0] >> 1).tolist()))
    assert counts == Counter(output)


def test_output_known_from_before_is_output() -> None:
    """A request that goes on after a restart: what came before the restart is penalised, and not as prompt."""
    request = Request(
        request_id="r", prompt_token_ids=(1, 2), output_token_ids=(2, 5, 5),
        sampling=SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1),
    )  # fmt: skip
    sampler = holding([Sequence(request)])
    assert {i: code for i, code in enumerate(sampler.tables.counts[0].tolist()) if code} == {1: 1, 2: 3, 5: 4}


@given(PARAMS, st.lists(TOKENS, max_size=6), st.lists(st.booleans(), max_size=6), st.integers(0, 1000))
@settings(max_examples=examples(60))
def test_counts_kept_from_step_to_step_are_those_of_a_fresh_start(
    params: dict[str, Any], prompt: list[int], is_in_step: list[bool], seed: int
) -> None:
    """Steps that pass a sequence over leave gaps; nothing may be lost or counted in them."""
    sequence, other = make_sequence(params, prompt), make_sequence({"frequency_penalty": 1.0})
    kept = holding([sequence, other])
    for step, is_in in enumerate(is_in_step):
        running = {0: sequence, 1: other} if is_in else {1: other}
        token_ids = sample(kept, make_logits(len(running), seed + step), running)
        for gaining, token_id in zip(running.values(), token_ids, strict=True):
            if token_id >= 0:
                gaining.token_ids.append(token_id)
        fresh = holding([sequence, other])
        assert kept.tables.counts.equal(fresh.tables.counts)
        assert kept.tables.rows.equal(fresh.tables.rows)


@given(st.lists(ROWS, min_size=1, max_size=5), st.data())
@settings(max_examples=examples(40))
def test_rows_come_and_go_in_any_order(rows: list[Any], data: st.DataObject) -> None:
    """Each step is over some of the sequences; their tokens are those of a sampler that has just got them."""
    sequences = [make_sequence(*row) for row in rows]
    kept = holding(sequences)
    for step in range(3):
        order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
        running, logits = {seat: sequences[seat] for seat in order}, make_logits(len(order), step)
        token_ids = sample(kept, logits, running)
        assert token_ids == choose_next(list(running.values()), logits)
        for seat, token_id in zip(order, token_ids, strict=True):
            if token_id >= 0:
                sequences[seat].token_ids.append(token_id)


@given(st.lists(st.tuples(st.integers(0, 2), ROWS, st.integers(1, 3)), max_size=6), st.integers(0, 1000))
@settings(max_examples=examples(60))
def test_seats_are_used_again(turns: list[tuple[int, Any, int]], seed: int) -> None:
    """Sequences come and go; what a seat held before is never seen again."""
    sampler = make_sampler(3)
    running: dict[int, Sequence] = {}
    for seat, row, num_steps in turns:
        sampler.release(seat)
        running[seat] = make_sequence(*row)
        sampler.assign(seat, running[seat])
        for step in range(num_steps):
            logits = make_logits(len(running), seed + step)
            token_ids = sample(sampler, logits, running)
            assert_by_hand(token_ids, logits, running.values())
            for (ended, sequence), token_id in zip(list(running.items()), token_ids, strict=True):
                sequence.token_ids.append(token_id)
                if token_id < 0:
                    sampler.release(ended)
                    del running[ended]
            if not running:
                break


def test_every_seat_can_be_penalised_at_once_and_again() -> None:
    """Each has a row of counts of its own, released or not, and released twice."""
    sampler = make_sampler(3)
    for turn in range(3):
        for seat in range(3):
            sampler.assign(seat, make_sequence({"presence_penalty": 1.0}, [], [seat + turn] * 2))
        counts = [[4 * (token == seat + turn) for token in range(VOCAB)] for seat in range(3)]
        assert sampler.tables.counts.tolist() == counts
        sampler.release(turn)
        sampler.release(turn)


def test_choices_of_one_request_count_their_own_output() -> None:
    params = {"frequency_penalty": 1.0}
    sampler = holding([make_sequence(params, [1], output, i) for i, output in enumerate(([5], [6, 6]))])
    assert sampler.tables.counts[0].nonzero().tolist() == [[5]]
    assert sampler.tables.counts[1].nonzero().tolist() == [[6]]
    assert sampler.tables.counts[1, 6] == 4


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9), st.integers(0, 50))
@settings(max_examples=examples(40))
def test_noise_depends_on_seed_choice_and_number_and_on_nothing_else(
    seed: int, index: int, number: int
) -> None:
    one = make_sequence({"seed": seed}, [1, 2], [3] * number, index)
    params = {"temperature": 0.3, "top_k": 2, "logit_bias": {1: 2.0}, "presence_penalty": 1.0}
    other = make_sequence({"seed": seed, **params}, [4], list(range(number)), index)
    neighbours = [
        make_sequence({"seed": seed + 1}, [1, 2], [3] * number, index),
        make_sequence({"seed": seed}, [1, 2], [3] * number, index + 1),
        make_sequence({"seed": seed}, [1, 2], [3] * (number + 1), index),
    ]
    rows = [one, other, *neighbours]
    numbers = torch.tensor([sequence.num_output_tokens for sequence in rows], dtype=torch.int32)
    keys = noise_keys(holding(rows, vocab=60).tables.column("state"), numbers).tolist()
    assert keys[0] % 2**64 == numpy_reference.noise_key(seed, index, number)
    assert keys[0] == keys[1]
    assert keys[0] not in keys[2:]


def test_too_many_biases_are_refused_and_change_nothing() -> None:
    sampler = Sampler(1, VOCAB, (EOS,), CPU, reference.choose, max_biases=2)
    sequence = make_sequence({"temperature": 0.0, "logit_bias": {5: 90.0, 6: 1.0}})
    sampler.assign(0, sequence)
    greedy = {"logit_bias": {1: 1.0, 2: 1.0}, "min_tokens": 1, "top_k": 2, "frequency_penalty": 1.0}
    with pytest.raises(ValueError, match="3 tokens with a bias or a ban; 2 are the most"):
        sampler.assign(0, make_sequence(greedy, [], [4]))
    assert sampler.filters([0]) == NOTHING
    assert not sampler.tables.counts.any()
    assert sample(sampler, make_logits(1, 0), {0: sequence}) == [5]


def test_ids_beyond_the_vocabulary_are_left_out() -> None:
    params = {"logit_bias": {VOCAB: 5.0, -1: 5.0, 2: 1.0}, "min_tokens": 1, "stop_token_ids": frozenset({99})}
    sampler = holding([make_sequence(params)], eos=())
    assert biases(sampler, 0) == {2: 1.0}


def test_a_token_with_a_bias_and_a_ban_stands_once() -> None:
    params = {"logit_bias": {EOS: 5.0, 2: 1.0}, "min_tokens": 1, "stop_token_ids": frozenset({9})}
    assert biases(holding([make_sequence(params)]), 0) == {2: 1.0, -1 - EOS: 5.0, -1 - 9: 0.0}
    assert biases(holding([make_sequence({**params, "min_tokens": 0})]), 0) == {2: 1.0, EOS: 5.0}


def test_a_bias_counts_once_the_token_is_no_longer_banned() -> None:
    params = {"temperature": 0.0, "min_tokens": 2, "logit_bias": {EOS: 5.0, 2: 3.0}}
    early, due = (make_sequence(params, [], [0] * num) for num in (1, 2))
    assert choose_next([early, due], torch.zeros(VOCAB)) == [2, EOS]


def test_biases_of_a_sequence_that_ended_are_added_to_no_token() -> None:
    sampler = holding([make_sequence({"logit_bias": {0: 9.0, 5: 9.0, 6: 9.0}})])
    greedy = make_sequence({"temperature": 0.0, "logit_bias": {7: 1.0}})
    sampler.assign(0, greedy)
    assert sample(sampler, torch.zeros(1, VOCAB), {0: greedy}) == [7]


def test_the_filters_of_a_step_are_what_some_row_asks_for() -> None:
    asked: list[dict[str, Any]] = [
        {"top_k": VOCAB},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    ]
    sampler = holding([make_sequence(params) for params in asked])
    assert sampler.filters([0, -1, 4]) == NOTHING
    assert sampler.filters([0, 1]) == Filters(top_k=True, top_p=False)
    assert sampler.filters([2]) == Filters(top_k=False, top_p=True)
    assert sampler.filters([3]) == Filters(top_k=False, top_p=True)
    assert sampler.filters([0, 1, 2]) == Filters()
    assert sampler.filters([]) == NOTHING


def test_a_released_seat_asks_for_nothing() -> None:
    sampler = holding([make_sequence({"top_k": 3, "top_p": 0.5, "num_logprobs": 1})])
    sampler.release(0)
    sampler.release(0)
    assert sampler.filters([0]) == NOTHING
    sampler.assign(0, make_sequence({"top_k": 3}))
    assert sampler.filters([0]) == Filters(top_k=True, top_p=False)


class Watched(Sequence):
    __slots__ = ("__weakref__",)


class WatchedRequest(Request):
    __slots__ = ("__weakref__",)


def test_sequences_that_ended_are_forgotten() -> None:
    """Nothing of one is held even while it runs: what its seat has to know is in the tables."""
    sampler = make_sampler(2)
    watched: list[weakref.ref[Any]] = []
    for turn in range(50):
        params = SamplingParams(presence_penalty=1.0, logit_bias={4: 1.0}, num_logprobs=3, top_k=2)
        request = WatchedRequest(request_id=str(turn), prompt_token_ids=(1, 2), sampling=params)
        sequence = Watched(request)
        sampler.assign(turn % 2, sequence)
        sample(sampler, make_logits(1, turn), {turn % 2: sequence})
        watched += [weakref.ref(request), weakref.ref(sequence)]
    del request, sequence
    gc.collect()
    assert not [ref for ref in watched if ref() is not None]


def test_a_seat_that_nothing_was_assigned_to_is_sampled_in_vain() -> None:
    """As when a graph is captured before there is a sequence."""
    sampler = make_sampler(2)
    seats, numbers = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    logits = make_logits(1, 0)
    token_ids = sampler.sample(logits, seats, numbers, Filters())
    assert token_ids.tolist() == [int(logits.argmax())]
    assert not sampler.tables.counts.any()
