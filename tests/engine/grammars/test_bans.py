"""Tokens that are ruled out: each token is the one that a step with those biases brings, whatever goes on beside."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason, Request
from penstock.engine.text.bans import Bans, bits_of
from tests.engine.driver import Driver
from tests.engine.fake_runner import drafting_always
from tests.engine.grammars.test_answers import (
    END,
    PERSONS,
    TOKENIZER,
    Answers,
    RandomProposer,
    driver,
    ending,
    request,
    told,
)

__all__ = ["driver"]

BAN, FAR_UP = -1e30, 128.0
NUM = 24
SHORT = st.integers(0, 3)
WORDS = st.lists(st.lists(SHORT, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)


def ruled_out(words: tuple[tuple[int, ...], ...], before: list[int]) -> set[int]:
    return {word[-1] for word in words if [*before, word[-1]][-len(word) :] == list(word)}


@given(st.sets(SHORT), WORDS, st.lists(SHORT, max_size=6))
def test_the_ends_of_words_are_ruled_out_where_their_beginnings_stand(
    allowed: set[int], words: tuple[tuple[int, ...], ...], before: list[int]
) -> None:
    bans, every = Bans(sorted(allowed), words), set(range(4))
    left = (allowed or every) - ruled_out(words, before)
    assert bans.kept(bits_of(every), before) == bits_of(left or allowed or every)
    assert bans.kept(bits_of(every), before[len(before) - min(len(before), bans.reach) :]) == bits_of(
        left or allowed or every
    )
    assert {token_id for token_id in every if bans.may_follow(token_id, before)} == left


COMMON = tuple(sorted({*TOKENIZER.encode(" is a big small dog cat. He she was to the and. It has,"), END}))
WITHIN = [tuple(TOKENIZER.encode(text)) for text in ("happy", "Bob", "1", '", "')]


def mixture(driver: Driver) -> list[Request]:
    """Requests that would say what is ruled out: runs of tokens of their own free answers."""
    free = [
        request("greedy", None, NUM, temperature=0.0),
        request("hot", None, NUM, seed=3, n=2),
        request("penalised", None, NUM, seed=6, presence_penalty=0.8),
    ]
    driver.fresh()
    driver.run(*free)
    words = {
        one.request_id: (tuple(said[3:6]), tuple(said[1:3]), (said[0],), tuple(said[5:9]))
        for one in free
        for said in [driver.tokens(one.request_id)]
    }
    return [
        request("greedy", None, NUM, temperature=0.0, bad_words=words["greedy"]),
        request("hot", None, NUM, seed=3, n=2, bad_words=words["hot"], min_tokens=9),
        request("penalised", None, NUM, seed=6, presence_penalty=0.8, bad_words=words["penalised"]),
        request("allowed", None, NUM, temperature=0.0, allowed_token_ids=COMMON, min_tokens=4),
        request(
            "few",
            None,
            NUM,
            temperature=0.0,
            min_tokens=9,
            allowed_token_ids=COMMON[:3],
            bad_words=(COMMON[:2],),
        ),
        request("held", PERSONS, 60, seed=9, bad_words=tuple(WITHIN)),
    ]


@pytest.fixture(scope="module")
def asked(driver: Driver) -> list[Request]:
    return mixture(driver)


@pytest.fixture(scope="module")
def together(driver: Driver, asked: list[Request]) -> Answers:
    driver.fresh()
    driver.run(*asked)
    return told(driver)


def tokens_of(answers: Answers, name: str, index: int = 0) -> list[int]:
    return [ids[0] for ids, *_ in answers[name, index]]


@pytest.mark.parametrize("name", ["greedy", "penalised", "allowed", "few"])
def test_each_token_is_the_one_that_its_own_step_with_biases_brings(
    driver: Driver, asked: list[Request], together: Answers, name: str
) -> None:
    (one,) = [one for one in asked if one.request_id == name]
    params, known = one.sampling, list[int]()
    said, num_ruled_out = tokens_of(together, name), 0
    for token_id in said:
        banned = ruled_out(params.bad_words, known)
        bias = dict.fromkeys(params.allowed_token_ids, FAR_UP) | dict.fromkeys(banned, BAN)
        kept = {f: getattr(params, f) for f in ("temperature", "seed", "presence_penalty", "min_tokens")}
        step = request("step", None, len(known) + 1, logit_bias=bias, output_token_ids=tuple(known), **kept)
        driver.fresh()
        driver.run(step)
        assert driver.tokens("step") == [token_id]
        num_ruled_out += bool(bias)
        known.append(token_id)
    assert num_ruled_out >= 2


def test_no_answer_has_what_is_ruled_out(asked: list[Request], together: Answers) -> None:
    for one in asked:
        for index in range(one.n):
            said = tokens_of(together, one.request_id, index)
            assert set(said) <= set(one.sampling.allowed_token_ids or said)
            for word in one.sampling.bad_words if one.sampling.grammar is None else ():
                assert word not in [tuple(said[i : i + len(word)]) for i in range(len(said))]
    assert json.loads("".join(text for _, text, *_ in together["held", 0])), (
        "the grammar goes before bad words"
    )


def test_the_same_after_preemption(driver: Driver, asked: list[Request], together: Answers) -> None:
    driver.fresh(budget=16)

    def disturb(step: int) -> None:
        sequences = driver.scheduler.sequences
        if step % 5 == 3 and sequences.running:
            sequences.preempt(sequences.running[step % len(sequences.running)])

    driver.run(*asked, before_step=disturb)
    assert driver.scheduler.sequences.counters.num_preemptions > 5
    assert told(driver) == together


def test_the_same_with_drafts(driver: Driver, asked: list[Request], together: Answers) -> None:
    driver.fresh()
    driver.scheduler.drafting = drafting_always(RandomProposer(together), driver.facts.max_drafts)
    driver.run(*asked)
    assert told(driver) == together
    counts = [outputs[-1].timings.drafts for outputs in driver.outputs.values() if outputs[-1].timings]
    assert sum(count["wild"].num_accepted for count in counts if "wild" in count) > 30


@pytest.mark.parametrize("name", ["greedy", "held"])
def test_known_tokens_are_gone_on_from(
    driver: Driver, asked: list[Request], together: Answers, name: str
) -> None:
    (one,) = [one for one in asked if one.request_id == name]
    said = tokens_of(together, name)
    for num_known in (1, 4, len(said) - 1):
        driver.fresh()
        driver.run(replace(one, output_token_ids=tuple(said[:num_known])))
        assert driver.tokens(name) == said[num_known:]


def test_a_grammar_that_no_allowed_token_fits_fails_its_request_alone(
    driver: Driver,
) -> None:
    driver.fresh()
    driver.run(
        request("stuck", PERSONS, allowed_token_ids=tuple(TOKENIZER.encode("abc"))),
        request("greedy", None, NUM, temperature=0.0),
    )
    (last,) = driver.outputs["stuck", 0]
    assert (last.finish_reason, last.error) == (
        FinishReason.FAILED,
        "no token is allowed by both the grammar and 'allowed_token_ids'",
    )
    assert ending(driver, "greedy") is not FinishReason.FAILED
