"""Scores the demo model on prompts that training never saw: `python -m lab.demo.score`.

Sums and pairs of hero and place are held out by a hash of their text (`facts.held_out`, `stories.held_out`).
Stories are sampled as generation_config.json says; everything with one right answer is decoded greedily.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.demo.answers import capital, colour, invented_person, json_exchange, legs, told_person, wish
from lab.demo.asking import request
from lab.demo.corpus import conversation, short_part
from lab.demo.facts import CAPITALS, ask_sum, numbers, working
from lab.demo.facts import held_out as sum_held_out
from lab.demo.grammar import fill, pick
from lab.demo.serving import QUESTIONS, TOPICS
from lab.demo.stories import ALL_PLACES, Spec, held_out
from lab.demo.tokenizer import CALL_START, Message
from lab.demo.tools import CALCULATOR, CLOCK, TOOLS, no_clock, tools_turn, without
from lab.demo.unknown import refusal
from lab.demo.words import HE_NAMES, HEROES, SHE_NAMES
from penstock.app.checkpoint import DEMO_MODEL

SEED = "held out"  # training seeds are numbers
STORY_TOKENS, ANSWER_TOKENS = 450, 120
BATCH = 25


class Talker:
    """A model in Hugging Face format that answers many conversations at once."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(
        self, conversations: Sequence[list[Message]], sample: bool = False, most: int = STORY_TOKENS
    ) -> list[tuple[str, bool]]:
        """The answers, and whether each ended by itself."""
        answers: list[tuple[str, bool]] = []
        for at in range(0, len(conversations), BATCH):
            answers += self._answer_batch(conversations[at : at + BATCH], sample, most)
        return answers

    def _answer_batch(
        self, conversations: Sequence[list[Message]], sample: bool, most: int
    ) -> list[tuple[str, bool]]:
        texts = [self.render(messages, prompt=True) for messages in conversations]
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        options = {} if sample else {"do_sample": False, "temperature": None, "top_p": None}
        with torch.no_grad():
            out = self.model.generate(**inputs, max_new_tokens=most, **options)
        new = out[:, inputs["input_ids"].shape[1] :]
        end = self.tokenizer.eos_token_id
        return [
            (self.tokenizer.decode(ids, skip_special_tokens=True), bool((ids == end).any())) for ids in new
        ]

    def render(self, messages: list[Message], prompt: bool) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return text

    def surprise(self, messages: list[Message]) -> tuple[float, int]:
        """Summed negative log likelihood of what the assistant says, and of how many tokens."""
        total, count = 0.0, 0
        for number, (role, _) in enumerate(messages):
            if role == "assistant":
                before = self.ids(self.render(messages[:number], prompt=True))
                ids = self.ids(self.render(messages[: number + 1], prompt=False))
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, len(before) - 1 : -1]
                said = torch.tensor(ids[len(before) :])
                total += float(F.cross_entropy(logits, said, reduction="sum"))
                count += len(said)
        return total, count

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


Figure = tuple[str, str]
"""A name and a value."""


def share(flags: Iterable[bool]) -> str:
    known = list(flags)
    return f"{100 * sum(known) / len(known):.1f} % of {len(known)}"


def perplexity(talker: Talker, count: int) -> list[Figure]:
    rng = Random(SEED)
    sums = [talker.surprise(conversation(rng, 500)) for _ in range(count)]
    tokens = sum(count for _, count in sums)
    value = math.exp(sum(total for total, _ in sums) / tokens)
    return [(f"perplexity of {tokens:,} held-out answer tokens", f"{value:.3f}")]


def story_figures(talker: Talker, count: int, sample: bool) -> list[Figure]:
    rng = Random(SEED)
    pairs = [(hero, place) for hero in HEROES for place in ALL_PLACES if held_out(hero, place)]
    specs = [Spec(hero=hero, trait="", place=place) for hero, place in rng.sample(pairs, count)]
    told = talker.answer([[("user", request(rng, spec))] for spec in specs], sample)
    hero = [mentions(text, spec.hero or "") >= 2 for (text, _), spec in zip(told, specs, strict=True)]
    place = [mentions(text, place_noun(spec)) >= 2 for (text, _), spec in zip(told, specs, strict=True)]
    sentences = [sentences_of(text) for text, _ in told]
    repeated = sum(len(some) - len(set(some)) for some in sentences) / sum(map(len, sentences))
    how = "sampled" if sample else "greedy"
    return [
        (f"stories that end by themselves ({how})", share(ended for _, ended in told)),
        (f"stories that keep their hero ({how})", share(hero)),
        (
            f"stories that keep hero and place ({how})",
            share(h and p for h, p in zip(hero, place, strict=True)),
        ),
        (
            f"repeated sentences within a story ({how})",
            f"{100 * repeated:.2f} % of {sum(map(len, sentences))}",
        ),
        (f"different sentences among all stories ({how})", share_different(sentences)),
        (f"words per story ({how})", f"{sum(len(text.split()) for text, _ in told) / len(told):.0f}"),
    ]


def place_noun(spec: Spec) -> str:
    assert spec.place is not None
    return spec.place.later.removeprefix("the ")


def mentions(text: str, noun: str) -> int:
    return len(re.findall(rf"\b{re.escape(noun)}\b", text, re.IGNORECASE))


def sentences_of(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])[\"”]?\s+", text) if len(sentence) > 12]


def share_different(stories: list[list[str]]) -> str:
    counted = Counter(sentence for story in stories for sentence in story)
    return f"{100 * len(counted) / counted.total():.1f} % of {counted.total()}"


def name_figure(talker: Talker, count: int) -> list[Figure]:
    """Asks for the hero's name after the model's own story about a hero whose name was given."""
    rng = Random(SEED)
    specs = [
        Spec(hero=pick(rng, HEROES), trait="", name=pick(rng, SHE_NAMES + HE_NAMES)) for _ in range(count)
    ]
    talks: list[list[Message]] = [[("user", request(rng, spec))] for spec in specs]
    stories = talker.answer(talks, sample=True)
    for talk, (story, _), spec in zip(talks, stories, specs, strict=True):
        talk += [("assistant", story), ("user", f"What was the name of the {spec.hero}?")]
    answers = talker.answer(talks, most=ANSWER_TOKENS)
    right = [(spec.name or "?") in text for (text, _), spec in zip(answers, specs, strict=True)]
    return [("hero's name remembered after the story", share(right))]


def sums(count: int) -> list[tuple[str, Callable[[str], bool]]]:
    rng = Random(SEED)
    cases: list[tuple[str, Callable[[str], bool]]] = []
    while len(cases) < count:
        sign = pick(rng, "++--*")
        first, second = numbers(rng, sign)
        if sum_held_out(first, sign, second):
            result = re.findall(r"\d+", working(first, sign, second))[-1]
            cases.append((ask_sum(rng, first, sign, second), last_number(result)))
    return cases


def last_number(result: str) -> Callable[[str], bool]:
    return lambda answer: (re.findall(r"\d+", answer) or [""])[-1] == result


def capitals() -> list[tuple[str, Callable[[str], bool]]]:
    return [(f"What is the capital of {country}?", contains(city)) for country, city in CAPITALS.items()]


def contains(wanted: str) -> Callable[[str], bool]:
    return lambda answer: wanted in answer


def about_serving() -> list[tuple[str, Callable[[str], bool]]]:
    rng = Random(SEED)
    cases: list[tuple[str, Callable[[str], bool]]] = []
    for names, answers, _ in TOPICS:
        cases.append((f"Please tell me, what is {names.split('|')[0]}?", starts_as_one_of(answers)))
    cases += [(fill(rng, f"[{question}]"), starts_as_one_of([answer])) for question, answer in QUESTIONS]
    return cases


def starts_as_one_of(answers: list[str]) -> Callable[[str], bool]:
    return lambda answer: any(answer.startswith(known) for known in answers)


def beyond(count: int) -> list[tuple[str, Callable[[str], bool]]]:
    rng = Random(SEED)
    refused = re.compile(r"do not know|cannot")
    return [(refusal(rng)[0][1], lambda answer: bool(refused.search(answer))) for _ in range(count)]


def answered(talker: Talker, name: str, cases: list[tuple[str, Callable[[str], bool]]]) -> list[Figure]:
    answers = talker.answer([[("user", question)] for question, _ in cases], most=ANSWER_TOKENS)
    return [(name, share(right(text) for (text, _), (_, right) in zip(answers, cases, strict=True)))]


Talk = list[Message]


def tool_figures(talker: Talker, count: int) -> Iterable[Figure]:
    """Both tools, with sums and pairs of wording and city that were held out."""
    rng = Random(SEED)
    for name, tool in (("calculator", CALCULATOR), ("clock", CLOCK)):
        calls: list[tuple[Talk, str]] = []
        uses: list[tuple[Talk, str]] = []
        for _ in range(count):
            system = tools_turn(rng, TOOLS)
            question, call, result, answer = tool.exchange(rng, True)
            calls.append(([system, question], call[1]))
            uses.append(([system, question, call, result], answer[1]))
        yield exact(talker, f"calls of the {name} that are right", calls)
        yield exact(talker, f"answers from the {name}'s result that are right", uses)
    plain = [[tools_turn(rng, TOOLS), without(rng, TOOLS, short_part)[0]] for _ in range(count)]
    said = talker.answer(plain, most=ANSWER_TOKENS)
    yield ("answers without a tool where none is needed", share(CALL_START not in text for text, _ in said))
    asked = [no_clock(rng)[:1] for _ in range(count)]
    said = talker.answer(asked, most=ANSWER_TOKENS)
    yield (
        "answers without a tool where none is offered",
        share("I have no clock" in text for text, _ in said),
    )


def exact(talker: Talker, name: str, cases: Sequence[tuple[Talk, str]]) -> Figure:
    answers = talker.answer([talk for talk, _ in cases], most=ANSWER_TOKENS)
    return (name, share(text == wanted for (text, _), (_, wanted) in zip(answers, cases, strict=True)))


def json_figures(talker: Talker, count: int) -> Iterable[Figure]:
    rng = Random(SEED)
    told = [wish(rng, *told_person(rng, unseen=True)) for _ in range(count)]
    yield exact(
        talker, "people told again as JSON, all members right", [([ask], said) for ask, (_, said) in told]
    )
    facts = [wish(rng, *pick(rng, [capital, colour, legs])(rng)) for _ in range(count)]
    yield exact(talker, "facts as JSON, all members right", [([ask], said) for ask, (_, said) in facts])
    asked = [json_exchange(rng) for _ in range(count)] + [
        wish(rng, *invented_person(rng)) for _ in range(count)
    ]
    answers = talker.answer([[ask] for ask, _ in asked], most=ANSWER_TOKENS)
    keys = [keys_of(text) == keys_of(said) for (text, _), (_, (_, said)) in zip(answers, asked, strict=True)]
    yield ("JSON with the members that were asked for", share(keys))


def keys_of(text: str) -> list[str]:
    """The members of an object laid out as `json.dumps` has it; none if it is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    return list(value) if isinstance(value, dict) and json.dumps(value) == text else []


def figures(talker: Talker, count: int) -> Iterable[Figure]:
    yield from tool_figures(talker, count)
    yield from json_figures(talker, count)
    yield from perplexity(talker, 3 * count)
    yield from story_figures(talker, count, sample=True)
    yield from story_figures(talker, count, sample=False)
    yield from name_figure(talker, count)
    yield from answered(talker, "held-out sums that are right", sums(2 * count))
    yield from answered(talker, "capitals that are right", capitals())
    yield from answered(talker, "serving questions answered as taught", about_serving())
    yield from answered(talker, "questions beyond it that it declines", beyond(count))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.demo.score", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument(
        "--count", type=int, default=100, help="stories per figure; other counts follow from it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    for name, value in figures(Talker(arguments.model), arguments.count):
        print(f"{name:<52} {value:>16}", flush=True)


if __name__ == "__main__":
    main()
