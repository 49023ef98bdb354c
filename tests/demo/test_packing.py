"""The demo model is taught the assistant's words alone of each conversation, and nothing across conversations."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo.batches import Batch, batch
from demo.corpus import sample, texts
from demo.network import within_talks
from demo.tokenizer import (
    BOS,
    END,
    ROLES,
    Message,
    encode_conversation,
    encode_text,
    special_id,
    train_tokenizer,
)
from tests.few import examples

IGNORED = -100
LENGTH = 128

TOKENIZER = train_tokenizer(texts(1, 60), vocab_size=400)
BOS_ID, END_ID = special_id(TOKENIZER, BOS), special_id(TOKENIZER, END)
ROLE_IDS = {role: special_id(TOKENIZER, token) for role, token in ROLES.items()}

contents = st.text(max_size=20)
exchanges = st.tuples(contents, contents).map(lambda pair: [("user", pair[0]), ("assistant", pair[1])])
conversations = st.tuples(
    st.none() | contents.map(lambda text: ("system", text)), st.lists(exchanges, min_size=1, max_size=3)
).map(
    lambda parts: [*([parts[0]] if parts[0] else []), *(message for turns in parts[1] for message in turns)]
)


def spoken(tokenizer: Tokenizer, ids: list[int], said: list[bool]) -> list[str]:
    """The runs of tokens that are learnt, as text."""
    runs: list[list[int]] = [[]]
    for token, is_said in zip(ids, said, strict=True):
        if is_said:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


@given(st.text())
@example("<|system|>")
def test_any_text_survives_a_tokenizer_of_our_training(text: str) -> None:
    assert TOKENIZER.decode(encode_text(TOKENIZER, text)) == text


@given(conversations)
def test_of_a_conversation_exactly_the_answers_are_learnt(messages: list[Message]) -> None:
    ids, said = encode_conversation(TOKENIZER, messages)
    answers = [f"{content}{END}" for role, content in messages if role == "assistant"]
    assert spoken(TOKENIZER, ids, said) == answers
    assert ids[0] == BOS_ID
    assert ids.count(END_ID) == len(messages)


def packed(seed: int, rows: int = 4, length: int = 512) -> Batch:
    return batch(TOKENIZER, sample, Random(seed), rows, length)


def talks_of(some: Batch) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and targets of each conversation of a batch; a place of padding is a talk of its own, with one token."""
    for inputs, targets, talks in zip(some.inputs, some.targets, some.talks, strict=True):
        for number in range(1, int(talks.max()) + 1):
            here = talks == number
            if here.sum() > 1:
                yield inputs[here].tolist(), targets[here].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_no_target_is_of_a_user_s_turn(seed: int) -> None:
    """Read back from the rows: whose turn a token is of follows from the last mark before it."""
    checked = 0
    for inputs, targets in talks_of(packed(seed)):
        turn = None
        for token, target in zip(inputs, targets, strict=True):
            turn = next((role for role, mark in ROLE_IDS.items() if mark == token), turn)
            if target != IGNORED:
                checked += 1
                assert turn in ("assistant", None), TOKENIZER.decode(inputs, skip_special_tokens=False)
    assert checked > 200


@pytest.mark.parametrize("seed", range(6))
def test_every_conversation_of_a_row_is_whole(seed: int) -> None:
    for inputs, targets in talks_of(packed(seed)):
        assert inputs[0] == BOS_ID
        assert inputs.count(BOS_ID) == 1
        learnt = [target for target in targets if target != IGNORED]
        assert learnt[-1] == END_ID


talk_numbers = st.lists(st.integers(1, 4), min_size=1, max_size=9).map(sorted)


@given(talk_numbers)
def test_a_token_sees_what_came_before_it_in_its_own_conversation(row: list[int]) -> None:
    (mask,) = within_talks(torch.tensor([row]))[:, 0].tolist()
    for i, seen in enumerate(mask):
        assert [value == 0 for value in seen] == [j <= i and row[j] == row[i] for j in range(len(row))]


@settings(max_examples=examples(25))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 3))
def test_rows_hold_whole_conversations_of_any_length(lengths: list[int], rows: int) -> None:
    """With a source of our own: nothing is cut and nothing is put in twice."""
    turns = itertools.cycle(lengths)
    made: list[str] = []

    def source(_: Random, __: int) -> list[Message]:
        made.append("7" * next(turns))
        return [("user", "?"), ("assistant", made[-1])]

    some = batch(TOKENIZER, source, Random(0), rows, LENGTH)
    answers = [TOKENIZER.decode([t for t in targets if t != IGNORED]) for _, targets in talks_of(some)]
    assert len(answers) >= rows
    assert not Counter(answers) - Counter(made)
