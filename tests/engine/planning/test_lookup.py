from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning import lookup as module
from penstock.engine.planning.lookup import LONGEST, SHORTEST, Lookup, TokenIndex
from penstock.engine.planning.request import FinishReason, Sequence
from tests.engine.fake_runner import make_request

tokens_of = st.lists(st.integers(0, 2), max_size=60)


def sequence_of(prompt: list[int], answer: list[int], tenant: str = "ann") -> Sequence:
    sequence = Sequence(replace(make_request("r", prompt, max_tokens=100), tenant=tenant))
    sequence.token_ids += answer
    return sequence


def best_by_hand(tokens: list[int], recent: list[int]) -> tuple[int, int]:
    """Finds, of the four latest places after the last three tokens, the one after the longest run."""
    places = [
        place
        for place in range(SHORTEST, len(tokens))
        if len(recent) >= SHORTEST and tokens[place - SHORTEST : place] == recent[-SHORTEST:]
    ]
    best = (0, 0)
    for place in reversed(places[-4:]):
        length = SHORTEST
        while length < min(LONGEST, place, len(recent)) and tokens[place - length - 1] == recent[-length - 1]:
            length += 1
        if length > best[1]:
            best = place, length
    return best


@given(tokens_of, st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 9))
def test_the_longest_run_is_found_while_the_text_grows(tokens: list[int], more: list[int], most: int) -> None:
    """Pieces of any length are indexed as the whole is."""
    index = TokenIndex(tokens)
    for token in [None, *more]:
        if token is not None:
            tokens.append(token)
        while num := index.update(most):
            assert num <= most
        assert index.find(tokens) == best_by_hand(tokens, tokens)


@given(tokens_of, tokens_of)
def test_the_longest_run_is_found_in_another_text(tokens: list[int], recent: list[int]) -> None:
    index = TokenIndex(tokens)
    index.update(len(tokens))
    assert index.find(recent) == best_by_hand(tokens, recent)


def proposed(lookup: Lookup, sequence: Sequence, length: int) -> list[int]:
    (found,) = lookup.propose([sequence], [length])
    return found


def test_what_followed_then_is_proposed() -> None:
    sequence = sequence_of([1, 2, 3, 4, 5, 6], [9, 1, 2, 3])
    assert proposed(Lookup(), sequence, 2) == [4, 5]
    assert proposed(Lookup(), sequence, 8) == [4, 5, 6, 9, 1, 2, 3, 4]


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert proposed(Lookup(), sequence_of([1], []), 4) == []
    assert proposed(Lookup(), sequence_of([1, 2, 3, 4], [5, 6]), 4) == []


def test_answers_of_the_same_tenant_are_remembered_and_nobody_elses() -> None:
    lookup = Lookup()
    ended = sequence_of([1], [5, 6, 7, 8, 9])
    assert proposed(lookup, ended, 4) == []
    ended.finish_reason = FinishReason.STOP
    lookup.forget(ended)
    assert proposed(lookup, sequence_of([3, 5, 6, 7], []), 2) == [8, 9]
    assert proposed(lookup, sequence_of([3, 5, 6, 7], [], tenant="bob"), 2) == []
    assert len(lookup._indexes) == 2, "those of the two that run"


def test_memory_is_bounded() -> None:
    lookup = Lookup()
    for i in range(1000):
        ended = sequence_of([1], [i % 7 + j for j in range(200)], tenant=f"t{i % 300}")
        lookup.propose([ended], [1])
        lookup.forget(ended)
    assert len(lookup._memories) == 256
    assert not lookup._indexes
    for _ in range(1000):
        lookup.forget(sequence_of([1], list(range(200))))
    memory = lookup._memories["ann", b""]
    assert len(memory.newer.tokens) + len(memory.older.tokens) <= 2 << 15


def test_a_step_indexes_a_bounded_number_of_tokens_and_later_ones_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_STEP_TOKENS", 40)
    ended = sequence_of([1], [100 + i for i in range(50)], tenant="bob")
    running = [sequence_of(list(range(90)), [5, 6, 7]) for _ in range(3)]
    lookup = Lookup()
    lookup.forget(ended)
    indexes, done, steps = lookup._indexes, 0, 0
    while not steps or lookup.is_behind:
        lookup.propose(running, [2] * 3)
        steps, before, done = steps + 1, done, sum(index.num_indexed - SHORTEST for index in indexes.values())
        assert done - before <= 40
    assert steps == 7 == -(-3 * 90 // 40)
    assert lookup.propose(running, [2] * 3) == [[8, 9]] * 3
    remembered = sequence_of([], [145, 146, 147], tenant="bob")
    assert [proposed(lookup, remembered, 1) for _ in range(2)] == [[], [148]], (
        "half of it was indexed, then all"
    )


def test_running_sequences_are_indexed_as_far_as_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_INDEXED", 150)
    running = [sequence_of(list(range(90)), [85, 86, 87]) for _ in range(3)]
    lookup = Lookup()
    for _ in range(9):
        assert lookup.propose(running, [1] * 3) == [[88], [], []]
        assert not lookup.is_behind, "there is nothing to wait for"
        assert sum(index.num_indexed for index in lookup._indexes.values()) <= 150 + 3 * SHORTEST
    lookup.forget(running.pop(0))
    assert lookup.propose(running, [1] * 2) == [[88], []]


def test_all_tenants_together_are_remembered_as_far_as_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_REMEMBERED", 1000)
    lookup = Lookup()
    for i in range(40):
        lookup.forget(sequence_of([1], list(range(90)), tenant=f"t{i % 20}"))
        assert sum(map(len, lookup._memories.values())) <= 1000
    assert list(lookup._memories) == [(f"t{i}", b"") for i in range(9, 20)], "those that answered last"
