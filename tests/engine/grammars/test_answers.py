"""Constrained answers match what they are held to, and are the same whatever is computed beside them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.engine.planning import masks as module
from penstock.engine.planning.lookup import Lookup
from penstock.engine.planning.masks import ForcedTokens, StepMasks
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.engine.planning.step import Chunk, StepPlan
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.sampling.tables import Filters
from penstock.engine.text.grammar import CompiledGrammar, Grammar, GrammarKind
from penstock.engine.text.grammars import Grammars
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.driver import Driver
from tests.engine.fake_runner import drafting_always
from tests.engine.grammars.schemas import random_schema
from tests.engine.sampling.cases import make_sampler
from tests.gateway.harness import EOS, make_tokenizer

NUM_SCHEMAS = 320
CONFIG, TOKENIZER = read_config(DEMO_MODEL), read_tokenizer(DEMO_MODEL)
END = CONFIG.eos_token_ids[0]
PROMPT = tuple(TOKENIZER.encode("<|user|>Tell me about Bob.<|end|><|assistant|>", parse_special=True))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "moods": {"type": "array", "items": {"enum": ["happy", "sad"]}, "maxItems": 3},
    },
    "required": ["name", "age", "moods"],
    "additionalProperties": False,
}


Answers = dict[tuple[str, int], list[Any]]


def of_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


PERSONS, WORDS = of_schema(PERSON), Grammar(GrammarKind.REGEX, "(yes|no)( [a-z]{2,5}){3}")


def request(name: str, grammar: Grammar | None, max_tokens: int = 60, **more: Any) -> Request:
    params = {key: more.pop(key) for key in list(more) if key in SamplingParams.__dataclass_fields__}
    sampling = SamplingParams(grammar=grammar, max_tokens=max_tokens, **params)
    return Request(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, **more)


@pytest.fixture(scope="module")
def driver() -> Driver:
    eos = CONFIG.eos_token_ids
    return Driver(DEMO_MODEL, grammars=Grammars(TOKENIZER, eos), sink=TextSink(TOKENIZER, eos))


def text_of(driver: Driver, name: str, index: int = 0) -> str:
    return "".join(output.text for output in driver.outputs[name, index])


def ending(driver: Driver, name: str, index: int = 0) -> FinishReason | None:
    return driver.outputs[name, index][-1].finish_reason


def is_valid(schema: Any, text: str) -> bool:
    return bool(jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text)))


def closing(tokenizer: Tokenizer, eos: int) -> dict[int, float]:
    """A bias towards the ends of texts and their parts, so that answers are short."""
    tokens = [tokenizer.id_of(text) for text in ('"', "]", "}")]
    return dict.fromkeys([eos, *(token_id for token_id in tokens if token_id is not None)], 12.0)


def test_every_answer_of_the_demo_model_validates(driver: Driver) -> None:
    schemas = {f"r{seed}": random_schema(seed) for seed in range(NUM_SCHEMAS)}
    asked = [
        request(name, of_schema(schema), 60, seed=number, logit_bias=closing(TOKENIZER, END))
        for number, (name, schema) in enumerate(schemas.items())
    ]
    driver.fresh()
    driver.run(*asked)
    num_ended = 0
    for name, schema in schemas.items():
        reason, text = ending(driver, name), text_of(driver, name)
        assert reason in (FinishReason.STOP, FinishReason.LENGTH), (schema, driver.outputs[name, 0][-1])
        if reason is FinishReason.STOP:
            num_ended += 1
            assert is_valid(schema, text), (schema, text)
    assert num_ended > 0.9 * NUM_SCHEMAS


def test_every_answer_of_a_random_model_validates() -> None:
    """Any token that the masks allow may come, in a vocabulary that is larger than the tokenizer's."""
    tokenizer, vocab = make_tokenizer(), 300
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    grammars, sampler = Grammars(tokenizer, (EOS,)), make_sampler(NUM_SCHEMAS, vocab=vocab, eos=(EOS,))
    going, step_masks = [], StepMasks(grammars)
    for i, schema in enumerate(schemas):
        sampling = SamplingParams(grammar=grammars.compile("", of_schema(schema)))
        going.append(Sequence(Request(request_id=f"r{i}", prompt_token_ids=(5,), sampling=sampling)))
    seats = {sequence: seat for seat, sequence in enumerate(going)}
    for sequence, seat in seats.items():
        sampler.assign(seat, sequence)
    pace, ended = np.random.default_rng(0), list[Sequence]()
    for number in range(120):
        masks = step_masks.of(StepPlan([Chunk(sequence, number, 1, samples=True) for sequence in going]))
        assert masks is not None
        logits = torch.from_numpy(pace.standard_normal((len(going), vocab)).astype(np.float32))
        for token_id, bias in closing(tokenizer, EOS).items():
            logits[:, token_id] += bias / 4
        rows = torch.tensor([seats[sequence] for sequence in going], dtype=torch.int32)
        allowed = sampler.masks(masks, [(row, 0) for row in range(len(going))])
        found = sampler.sample(logits, rows, torch.zeros_like(rows), Filters(), allowed)
        for sequence, token_id in zip(going, found.tolist(), strict=True):
            assert sequence.guide is not None
            sequence.guide.advance(token_id)
            assert not sequence.guide.error, (schemas[seats[sequence]], sequence.guide.error)
            if token_id != EOS:
                sequence.token_ids.append(token_id)
            if sequence.guide.is_complete:
                ended.append(sequence)
        going = [sequence for sequence in going if sequence not in ended]
    for sequence in ended:
        schema, text = schemas[seats[sequence]], tokenizer.decode(sequence.token_ids[1:])
        assert is_valid(schema, text), (schema, text)
    assert len(ended) > 0.8 * NUM_SCHEMAS


MIXTURE = [
    request("greedy", PERSONS, temperature=0.0),
    request("hot", PERSONS, temperature=1.3, seed=4, n=2),
    request("filtered", WORDS, top_k=9, top_p=0.8, seed=5, num_logprobs=2),
    request("penalised", PERSONS, seed=6, presence_penalty=0.8, frequency_penalty=0.5),
    request("sifted", WORDS, typical_p=0.9, top_k=30, xtc_probability=0.5, frequency_penalty=0.3, seed=9),
    request("sifted again", None, 20, top_a=0.3, min_p=0.01, xtc_probability=0.7, seed=10, n=2),
    request("free", None, 20, seed=7),
    request("free again", None, 20, seed=8, n=2),
]


def told(driver: Driver) -> Answers:
    return {
        key: [(output.token_ids, output.text, output.logprobs, output.finish_reason) for output in outputs]
        for key, outputs in driver.outputs.items()
    }


@pytest.fixture(scope="module")
def alone(driver: Driver) -> Answers:
    """The answers of the mixture, one after another."""
    found: Answers = {}
    for one in MIXTURE:
        driver.fresh()
        driver.run(one)
        found |= told(driver)
    return found


def test_the_answers_match(alone: Answers) -> None:
    for name, index in [("greedy", 0), ("hot", 0), ("hot", 1), ("penalised", 0)]:
        assert alone[name, index][-1][3] is FinishReason.STOP
        assert is_valid(PERSON, "".join(text for _, text, _, _ in alone[name, index]))
    assert alone["hot", 0] != alone["hot", 1]
    (logprobs,) = alone["filtered", 0][0][2]
    allowed = {TOKENIZER.decode([token_id]) for token_id, _ in logprobs.top} & {"yes", "no"}
    assert not allowed, "log probabilities are those before any processing"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_same_in_a_batch(
    driver: Driver, alone: Answers, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_NUM_THREADS", num_threads)
    driver.fresh(budget=16)
    driver.run(*MIXTURE)
    assert told(driver) == alone


def test_the_same_after_preemption(driver: Driver, alone: Answers) -> None:
    driver.fresh()

    def disturb(step: int) -> None:
        sequences = driver.scheduler.sequences
        if step % 5 == 3 and sequences.running:
            sequences.preempt(sequences.running[step % len(sequences.running)])

    driver.run(*MIXTURE, before_step=disturb)
    assert driver.scheduler.sequences.counters.num_preemptions > 5
    assert told(driver) == alone


class RandomProposer:
    """Proposes what is allowed and what is not: the right tokens of an answer, or any."""

    name = "wild"
    is_behind = False

    def __init__(self, answers: Answers) -> None:
        self._answers = {key: [ids[0] for ids, *_ in outputs] for key, outputs in answers.items()}
        self._pace = np.random.default_rng(1)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        found = []
        for sequence, length in zip(sequences, lengths, strict=True):
            right = self._answers[sequence.key][sequence.num_output_tokens :][:length]
            is_right = self._pace.random(len(right)) < 0.8
            found.append(
                [t if ok else int(self._pace.integers(3000)) for t, ok in zip(right, is_right, strict=True)]
            )
        return found

    def forget(self, sequence: Sequence) -> None: ...


@pytest.mark.parametrize("kind", ["wild", "forced", "lookup"])
def test_the_same_with_drafts(driver: Driver, alone: Answers, kind: str) -> None:
    driver.fresh()
    proposer = RandomProposer(alone) if kind == "wild" else Lookup()
    forced = ForcedTokens() if kind == "forced" else None
    driver.scheduler.drafting = drafting_always(proposer, driver.facts.max_drafts, forced=forced)
    driver.run(*MIXTURE)
    assert told(driver) == alone
    counts = [outputs[-1].timings.drafts for outputs in driver.outputs.values() if outputs[-1].timings]
    if kind == "forced":
        (count,) = [count["grammar"] for count in counts if "grammar" in count][:1]
        assert count.num_accepted > 0.7 * count.num_drafted > 0
    elif kind == "wild":
        assert sum(count["wild"].num_accepted for count in counts if "wild" in count) > 50


def test_known_tokens_are_gone_on_from(driver: Driver, alone: Answers) -> None:
    whole = [ids[0] for ids, *_ in alone["greedy", 0]]
    for num_known in (1, len(whole) // 2, len(whole) - 1):
        driver.fresh()
        driver.run(request("greedy", PERSONS, temperature=0.0, output_token_ids=tuple(whole[:num_known])))
        assert driver.tokens("greedy") == whole[num_known:]
        assert ending(driver, "greedy") is FinishReason.STOP


def test_a_complete_answer_that_is_gone_on_from_ends(driver: Driver, alone: Answers) -> None:
    whole = tuple(ids[0] for ids, *_ in alone["greedy", 0])
    driver.fresh()
    driver.run(request("greedy", PERSONS, temperature=0.0, output_token_ids=whole))
    assert (text_of(driver, "greedy"), ending(driver, "greedy")) == ("", FinishReason.STOP)


MANY = Grammar(GrammarKind.REGEX, "a{1,9}")
A = TOKENIZER.id_of("a")
EAGER: dict[str, Any] = {"temperature": 0.0, "logit_bias": {END: 100.0, A: 50.0}}
"""Ends as soon as it may, and else says one letter at a time."""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "a"),
        ({"min_tokens": 5}, "aaaaa"),
        ({"min_tokens": 40}, "aaaaaaaaa"),
        ({"ignore_eos": True}, "aaaaaaaaa"),
        ({"stop_token_ids": frozenset({A})}, ""),
    ],
    ids=["as it is", "min_tokens", "min_tokens beyond the end", "ignore_eos", "stop token"],
)
def test_the_end_is_held_back_as_long_as_something_else_may_follow(
    driver: Driver, more: dict[str, Any], expected: str
) -> None:
    driver.fresh()
    driver.run(request("r", MANY, **{**EAGER, **more}))
    assert (text_of(driver, "r"), ending(driver, "r")) == (expected, FinishReason.STOP)


def unchecked(driver: Driver, grammar: Grammar) -> CompiledGrammar:
    """A grammar that is compiled, whatever the check would say of it."""
    assert driver.grammars is not None
    return CompiledGrammar(grammar, driver.grammars._compile(grammar))


def test_a_grammar_that_grows_too_large_fails_its_request_alone(driver: Driver, alone: Answers) -> None:
    """After its first token, llguidance's limits end it: any of many members may follow."""
    many = of_schema({"type": "object", "properties": {f"p{i}": {} for i in range(500)}})
    driver.fresh()
    driver.run(request("many", unchecked(driver, many)), MIXTURE[0])
    last = driver.outputs["many", 0][-1]
    assert text_of(driver, "many") == "{"
    assert last.finish_reason is FinishReason.FAILED
    assert "items" in (last.error or "")
    assert told(driver)["greedy", 0] == alone["greedy", 0]


def test_what_is_no_grammar_fails_its_request_alone(driver: Driver, alone: Answers) -> None:
    driver.fresh()
    broken = [
        request("regex", unchecked(driver, Grammar(GrammarKind.REGEX, "("))),
        request("json", unchecked(driver, Grammar(GrammarKind.JSON_SCHEMA, "{"))),
    ]
    not_compiled = request("plain", WORDS)
    driver.queue.put(not_compiled, 0.0)
    driver.run(*broken, MIXTURE[0])
    for one in (*broken, not_compiled):
        (output,) = driver.outputs[one.request_id, 0]
        assert output.finish_reason is FinishReason.FAILED
        assert output.error is not None
        assert output.error.startswith(("the grammar could not be followed", "the grammar was not compiled"))
    assert told(driver)["greedy", 0] == alone["greedy", 0]
