"""Decisions of a real server with its real model, by clients as they are, against transformers' own probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import langchain_openai.decisions as langchain
import ollama
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from loadtests.forked import ForkedServer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.questions import LEAD

MODEL = "penstock-demo"
FOLDER = Path("app/demo/model")
INPUT = "I was charged twice for my order. Please fix it today!"
CHOICES: list[str | bool] = ["bill", "billing", "technical support", True, "true"]
"""Of several tokens; one is the beginning of another."""


@pytest.fixture
def client(live_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def exact() -> Iterator[openai.OpenAI]:
    """Of a server that rounds as little as transformers does."""
    server = ForkedServer(["--dtype", "float32"])
    server.wait_ready()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@torch.inference_mode()
def probability(oracle: Any, prompt: list[int], label: list[int], ends: tuple[int, ...] = ()) -> float:
    """The product of the probabilities of a label's tokens; with `ends`, that it then ends counts, too."""
    logits = oracle(torch.tensor([[*prompt, *label]])).logits[0, len(prompt) - 1 :].double().softmax(-1)
    product = torch.stack([logits[place, token] for place, token in enumerate(label)]).prod()
    return float(product * (logits[len(label), list(ends)].sum() if ends else 1))


def prompt_of(question: str) -> list[int]:
    prompts = Prompts(Tokenizer.load(FOLDER))
    return prompts.chat([{"role": "user", "content": f"{INPUT}{LEAD}{question}"}])


def test_probabilities_are_the_products_of_transformers(exact: openai.OpenAI, oracle: Any) -> None:
    encode = Tokenizer.load(FOLDER).encode
    questions: Any = [
        {"type": "choice", "instructions": "Which?", "choices": [{"value": value} for value in CHOICES]},
        {"type": "predicate", "instructions": "Is it urgent?"},
    ]
    labels = ['"bill"', '"billing"', '"technical support"', "true", '"true"']
    prompt = prompt_of("\n".join(("Which?", *(f"- {label}" for label in labels))))
    expected = [probability(oracle, prompt, encode(label)) for label in labels]
    choice, predicate = exact.decisions.create(model=MODEL, input=INPUT, questions=questions).answers
    assert isinstance(choice, openai.types.decision.AnswerAnswerResourceChoice)
    found = [each.probability for each in choice.probabilities]
    assert found == pytest.approx([each / sum(expected) for each in expected], rel=2e-3)
    assert choice.model_extra is not None
    assert choice.model_extra["label_mass"] == pytest.approx(sum(expected), rel=2e-3)
    prompt = prompt_of("Is it urgent?\n- Yes\n- No")
    yes, no = (probability(oracle, prompt, encode(label)) for label in ("Yes", "No"))
    assert isinstance(predicate, openai.types.decision.AnswerAnswerResourcePredicate)
    assert predicate.probability == pytest.approx(yes / (yes + no), rel=2e-3)


def test_a_label_that_others_begin_with_ends_as_transformers_says(exact: openai.OpenAI, oracle: Any) -> None:
    encode, values = Tokenizer.load(FOLDER).encode, ["I was", "I was late"]
    assert encode(values[1])[: len(encode(values[0]))] == encode(values[0])
    prompt = prompt_of("\n".join(("Which?", *(f"- {value}" for value in values))))
    expected = [
        probability(oracle, prompt, encode(values[0]), ends=(1,)),
        probability(oracle, prompt, encode(values[1])),
    ]
    question: Any = {"type": "choice", "instructions": "Which?", "choices": [{"value": v} for v in values]}
    (choice,) = exact.decisions.create(model=MODEL, input=INPUT, questions=[question]).answers
    assert isinstance(choice, openai.types.decision.AnswerAnswerResourceChoice)
    found = [each.probability for each in choice.probabilities]
    assert found == pytest.approx([each / sum(expected) for each in expected], rel=2e-3)


def test_four_hundred_questions_are_answered_as_each_alone(client: openai.OpenAI) -> None:
    questions: list[Any] = [
        {"type": "predicate", "instructions": f"Is it number {i}?", "name": str(i)} for i in range(400)
    ]
    whole = client.decisions.create(model=MODEL, input=INPUT, questions=questions)
    assert [answer.name for answer in whole.answers] == [str(i) for i in range(400)]
    for i in (0, 257, 399):
        alone = client.decisions.create(model=MODEL, input=INPUT, questions=[questions[i]])
        told, expected = (answer.model_dump() for answer in (whole.answers[i], alone.answers[0]))
        assert told["probability"] == pytest.approx(expected["probability"], rel=1e-4)


def test_what_is_shared_is_counted_once_and_found_in_the_cache(client: openai.OpenAI) -> None:
    question: Any = {"type": "predicate", "instructions": "Is it urgent?"}
    text = "A new text, long enough to fill some blocks of the cache. " * 8
    one, two, again = (
        client.decisions.create(model=MODEL, input=text, questions=[question] * n).usage for n in (1, 2, 2)
    )
    assert two.input_tokens - one.input_tokens < 40
    assert (one.input_tokens_details.cached_tokens, one.output_tokens) == (0, 0)
    assert again.input_tokens == two.input_tokens
    assert again.input_tokens_details.cached_tokens > 64


@pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta")
def test_langchain_asks(live_server: str) -> None:
    asker = langchain.OpenAIDecisions(model=MODEL, base_url=f"{live_server}/v1", api_key="none")
    reply = asker.invoke(
        {
            "input": INPUT,
            "questions": {
                "urgent": langchain.Predicate(instructions="Is it urgent?"),
                "team": langchain.Choice(
                    instructions="Whose is it?", choices={"billing": "Money.", "other": None}
                ),
                "anger": langchain.Score(instructions="How angry?", levels=["calm", "angry"]),
            },
        }
    )
    assert 0 <= reply.predicates["urgent"].probability <= 1
    assert sum(reply.choices["team"].probabilities.values()) == pytest.approx(1)
    assert reply.scores["anger"].legend == {0: "calm", 1: "angry"}
    asker._client.close()


def test_ollamas_client_asks(live_server: str) -> None:
    questions: Any = {
        "urgent": {"type": "noul", "instructions": "Is it urgent?"},
        "team": {
            "type": "choice",
            "instructions": "Whose is it?",
            "criteria": {"billing": "Money", "other": None},
        },
        "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "angry"]},
    }
    with ollama.Client(live_server) as client:
        reply = client.systemone(MODEL, INPUT, questions, keep_alive="5m")
    assert set(reply.answers) == {"urgent", "team", "anger"}
    assert sum(reply.answers["team"]["probabilities"].values()) == pytest.approx(1)
    assert 0 <= reply.answers["anger"]["score"] <= 1


def test_streams_go_on_beside_many_questions(live_server: str) -> None:
    """A stream that began before them gets tokens while they are computed."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "ignore_eos": True,
        "max_tokens": 1500,
    }
    questions = {str(i): {"type": "noul", "instructions": f"Is it number {i}?"} for i in range(400)}
    asked = {"model": MODEL, "state": INPUT, "questions": questions}
    with (
        httpx.Client(base_url=live_server, timeout=60) as http,
        ThreadPoolExecutor(1) as threads,
        http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply,
    ):
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        next(lines)
        answering = threads.submit(httpx.post, f"{live_server}/v1/systemone", json=asked, timeout=60)
        num_meanwhile = sum(1 for _ in takewhile(lambda _: not answering.done(), lines))
        assert len(answering.result().json()["answers"]) == 400
    assert num_meanwhile > 5
