from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.planning.lookup import LONGEST, SHORTEST, Lookup, TokenIndex
from engine.planning.request import FinishReason, Sequence
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


@given(tokens_of, st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_the_longest_run_is_found_while_the_text_grows(tokens: list[int], more: list[int]) -> None:
    index = TokenIndex(tokens)
    assert index.find(tokens) == best_by_hand(tokens, tokens)
    for token in more:
        tokens.append(token)
        assert index.find(tokens) == best_by_hand(tokens, tokens)


@given(tokens_of, tokens_of)
def test_the_longest_run_is_found_in_another_text(tokens: list[int], recent: list[int]) -> None:
    assert TokenIndex(tokens).find(recent) == best_by_hand(tokens, recent)


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
