# ruff: noqa: E501 (templates: a line per thought)
"""Questions and answers about Penstock and about how a language model is served."""

from random import Random

from demo.grammar import as_typed, chance, fill, phrases, pick
from demo.tokenizer import Message

_PHRASES = phrases("serving")
TOPICS: list[tuple[str, list[str], list[str]]] = [tuple(each) for each in _PHRASES["topics"]]
"""Names of a thing, then what may be said of it: first what it is, then more for "tell me more".

A question about a topic is built from its first name or any other.
"""
ASKS: list[str] = _PHRASES["asks"]
QUESTIONS: list[tuple[str, str]] = [tuple(each) for each in _PHRASES["questions"]]
PLURAL = {"tokens", "lanes", "tenants", "LLMs", "GPUs", "transformers", "CUDA graphs", "stop sequences", "server-sent events",
          "resumable streams", "the lanes", "priority lanes", "quantized weights"}  # fmt: skip
MORE = "[Tell me more.|More, please.|Can you tell me more?|And what else?|Go on.|What else?|More about that.|Why?|Why is that good?]"


def about_serving(rng: Random) -> list[Message]:
    if chance(rng, 0.33):
        question, answer = pick(rng, QUESTIONS)
        return [("user", as_typed(rng, fill(rng, f"[{question}]"))), ("assistant", answer)]
    names, answers, more = pick(rng, TOPICS)
    name = pick(rng, [names.split("|")[0], *names.split("|")])
    question = number_agrees(pick(rng, ASKS).format(x=name), name)
    question = question[0].upper() + question[1:]
    messages: list[Message] = [("user", as_typed(rng, question)), ("assistant", pick(rng, answers))]
    if chance(rng, 0.35):
        messages += [("user", as_typed(rng, fill(rng, MORE))), ("assistant", more[0])]
        if len(more) > 1:
            messages += (
                [("user", as_typed(rng, fill(rng, MORE))), ("assistant", more[1])] if chance(rng, 0.4) else []
            )
    elif chance(rng, 0.3):
        messages[-1] = ("assistant", f"{messages[-1][1]} {more[0]}")
    return messages


def number_agrees(question: str, name: str) -> str:
    if name not in PLURAL:
        return question
    return question.replace("What is ", "What are ").replace("What's ", "What are ").replace(" does ", " do ").replace(
        f"{name} is", f"{name} are"
    )  # fmt: skip
