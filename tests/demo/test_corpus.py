"""Properties of the generated corpus."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from demo import answers, facts, stories, tools
from demo.corpus import conversation, lesson, sample
from demo.moods import MOODS
from demo.plots import PLOTS, Plot
from demo.stories import Spec, Tale, new_spec, new_tale, story
from demo.tokenizer import CALL_END, CALL_START, RESULT_END, RESULT_START, TOOLS_INTRODUCTION, Message
from demo.words import HEROES

MANY = range(400)
UNFINISHED = re.compile(r"[\[\]{}|]|\.\.|,,| {2}|\?\.| [.,;!?]")


def tales() -> list[tuple[Tale, str]]:
    return [(tale, story(rng, tale)) for rng in map(Random, MANY) for tale in [new_tale(rng, new_spec(rng))]]


def test_the_same_seed_makes_the_same_conversation() -> None:
    for seed in range(20):
        assert sample(Random(seed), 500) == sample(Random(seed), 500)
    assert len({str(conversation(Random(seed), 500)) for seed in range(50)}) == 50


@pytest.mark.parametrize("tokens", [500, 2000])
def test_user_and_assistant_take_turns(tokens: int) -> None:
    for seed in range(150):
        roles = [role for role, _ in conversation(Random(seed), tokens)]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


def test_nothing_is_left_unfinished() -> None:
    for seed in MANY:
        for _, content in sample(Random(seed), 500):
            assert content.strip() == content
            assert content
            assert not UNFINISHED.search(content), content


def lessons() -> Iterator[list[Message]]:
    return (lesson(Random(seed), 500) for seed in MANY)


def test_a_tool_is_asked_for_what_its_answer_tells() -> None:
    """Each call with its result and the sentence that follows."""
    names = Counter[str]()
    for messages in lessons():
        for (_, said), (_, result), (_, told) in zip(messages, messages[1:], messages[2:], strict=False):
            if not said.startswith(CALL_START):
                continue
            asked = json.loads(said.removeprefix(CALL_START).removesuffix(CALL_END))
            name, arguments = asked["name"], asked["arguments"]
            names[name] += 1
            assert f"\n{name}(" in messages[0][1]
            value = result.removeprefix(RESULT_START).removesuffix(RESULT_END)
            value = str(next(iter(json.loads(value).values()))) if value.startswith("{") else value
            if name == "calculator":
                assert told == f"It is {value}."
                assert float(value) == pytest.approx(worked_out(arguments["expression"]), abs=1e-4)
            else:
                assert told == f"It is {value} in {arguments['city']}." if arguments else f"It is {value}."
    assert min(names["calculator"], names["clock"]) > 100


def worked_out(expression: str) -> float:
    first, sign, second = expression.split()
    a, b = int(first), int(second)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}[sign]


def plainly_answered() -> Iterator[tuple[str, str, str]]:
    """Yields the system prompt of a conversation, a question that no tool was called for, and its answer."""
    for messages in lessons():
        first = messages[0][1] if messages[0][0] == "system" else ""
        for (role, question), (_, answer) in pairwise(messages):
            if role == "user" and not question.startswith(RESULT_START) and not answer.startswith(CALL_START):
                yield first, question, answer


def test_who_asks_for_the_time_where_no_clock_is_offered_hears_that_there_is_none() -> None:
    answers_by_offer: dict[bool, list[str]] = {False: [], True: []}
    for first, question, answer in plainly_answered():
        if "time is it" in question.lower():
            answers_by_offer[TOOLS_INTRODUCTION in first].append(answer)
    for given in answers_by_offer.values():
        assert len(given) > 3
        assert all(answer.startswith("I have no clock") for answer in given)


def test_json_has_the_members_that_were_asked_for_by_name() -> None:
    by_name = 0
    for seed in MANY:
        (_, asked), (_, answer) = answers.json_exchange(Random(seed))
        members = json.loads(answer)
        assert json.dumps(members) == answer
        if keys := re.search(r"as JSON with ([a-z, ]+)\.$", asked):
            by_name += 1
            assert re.split(", | and ", keys[1]) == list(members)
    assert by_name > 100


@pytest.mark.parametrize("unseen", [False, True])
def test_of_tools_and_people_the_score_asks_what_training_does_not(unseen: bool) -> None:
    for rng in map(Random, MANY):
        person = answers.new_person(rng, unseen)
        assert answers.held_out(str(person["name"]), str(person["city"])) == unseen
        assert tools.held_out(*tools.wording_and_city(rng, unseen)) == unseen
        first, sign, second = tools.calculation(rng, unseen)[1].split()
        assert facts.held_out(int(first), sign, int(second)) == unseen


def test_a_story_has_what_was_asked_for() -> None:
    for seed in MANY:
        rng = Random(seed)
        spec = new_spec(rng)
        tale = new_tale(rng, spec)
        text = story(rng, tale)
        for wanted in (spec.hero, spec.trait, spec.name, spec.friend, spec.place and spec.place.first):
            assert not wanted or wanted in text, (spec, text)
        if spec.thing and spec.length != "short":
            assert spec.thing in text
        if spec.topic:
            assert spec.topic in tale.plot.topics


def test_a_story_says_no_sentence_twice() -> None:
    for _, text in tales():
        sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if len(sentence) > 12]
        assert max(Counter(sentences).values()) == 1, text


def test_pronouns_fit_their_people() -> None:
    """With hero and friend of one sex, the pronouns of the other never occur."""
    others = {"she": {"he", "him", "his"}, "he": {"she", "her", "hers"}}
    ill = "The doctor shook her head"  # of somebody else, in one of the plots
    checked = 0
    for tale, text in tales():
        if tale.sex != tale.friend_sex or "mother" in text or ill.split()[1] in text or "magpie" in text:
            continue
        checked += 1
        assert not others[tale.sex] & set(re.findall(r"[a-z]+", text.lower())), text
    assert checked > 50


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
@pytest.mark.parametrize("mood", MOODS)
def test_every_plot_can_be_told_in_every_mood(plot: Plot, mood: str) -> None:
    rng = Random(1)
    for length in stories.LENGTHS:
        tale = replace(new_tale(rng, Spec(mood=mood, length=length)), plot=plot)
        assert not UNFINISHED.search(story(rng, tale))


def test_held_out_pairs_are_never_asked_for() -> None:
    specs = [new_spec(Random(seed)) for seed in range(4000)]
    pairs = [(spec.hero, spec.place) for spec in specs if spec.hero and spec.place]
    assert len(pairs) > 500
    assert not any(stories.held_out(hero, place) for hero, place in pairs)
    assert any(stories.held_out(hero, place) for hero in HEROES for place in stories.ALL_PLACES)
