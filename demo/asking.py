# ruff: noqa: E501 (templates: a line per thought)
"""The ways in which people ask for a story, and their questions once they have heard it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from demo.grammar import a, as_typed, chance, fill, phrases, pick, upper_first
from demo.moods import MOODS, OPENINGS
from demo.stories import (
    Slots,
    Spec,
    Tale,
    any_hero,
    any_name,
    any_place,
    epilogue,
    new_spec,
    new_tale,
    one_sentence,
    short_story,
    story,
    title,
)
from demo.tokenizer import Message

_PHRASES = phrases("asking")
REQUESTS: list[str] = _PHRASES["requests"]
KINDS: list[str] = _PHRASES["kinds"]


def request(rng: Random, spec: Spec) -> str:
    what = fill(rng, pick(rng, REQUESTS), {"what": "{what}", "What": "{What}", "about": "{about}"})
    thing, about = kind_of_story(rng, spec), subject(rng, spec)
    return as_typed(rng, what.format(what=thing, What=upper_first(thing), about=about))


def kind_of_story(rng: Random, spec: Spec) -> str:
    words = [pick(rng, KINDS)]
    if spec.mood:
        words.insert(0, pick(rng, MOODS[spec.mood][0]))
    if spec.length == "long":
        words.insert(0, "long")
    if spec.length == "short":
        if chance(rng, 0.3):
            how_many = fill(rng, "[three|a few|two or three]")
            return f"{a(' '.join(words))} in {how_many} sentences"
        words.insert(0, pick(rng, ["very short", "very short", "tiny", "quick"]))
    return a(" ".join(words))


def subject(rng: Random, spec: Spec) -> str:
    """about a brave knight called Tom in a castle, ..."""
    parts = []
    if spec.hero:
        hero = f"{spec.trait or ''} {spec.hero}".strip()
        plural = chance(rng, 0.06) and not spec.name and hero[-1] in "nrtlkmdb" and not hero.endswith("man")
        parts.append(f" about {hero}s" if plural else f" about {a(hero)}")
    elif spec.name:
        parts.append(f" about {spec.name}")
    if spec.name and spec.hero:
        parts.append(f" [called|named|whose name is] {spec.name}")
    if spec.friend:
        parts.append(f" and {a(spec.friend)}" if spec.hero and not spec.name else f" with {a(spec.friend)}")
    if spec.place:
        where = f"{spec.place.preposition} {spec.place.first}"
        parts.append(f" [|who lives |set |]{where}" if parts else f" [set |that happens ||]{where}")
    if spec.thing:
        parts.append(f" [with|and] {a(spec.thing)}" if parts else f" about {a(spec.thing)}")
    if spec.topic:
        parts.append(f" and {spec.topic}" if parts and not spec.place else f" about {spec.topic}")
    return fill(rng, "".join(parts))


def told_story(rng: Random, spec: Spec) -> tuple[Tale, list[Message]]:
    tale = new_tale(rng, spec)
    return tale, [("user", request(rng, spec)), ("assistant", story(rng, tale))]


def story_talk(rng: Random, turns: int) -> list[Message]:
    """A story and up to `turns` questions or wishes that follow from it."""
    tale, messages = told_story(rng, new_spec(rng))
    parts_told = 0
    for _ in range(turns):
        kind = rng.random()
        if kind < 0.2:
            messages += [("user", asked(rng, MORE)), ("assistant", epilogue(rng, tale, parts_told))]
            parts_told += 1
        elif kind < 0.68:
            question, answer = pick(rng, QUESTIONS)(rng, tale)
            messages += [("user", asked(rng, question)), ("assistant", fill(rng, answer))]
        elif kind < 0.84:
            question, answer = shorter(rng, tale)
            messages += [("user", asked(rng, question)), ("assistant", answer)]
        else:
            tale, question = changed(rng, tale)
            messages += [("user", asked(rng, question)), ("assistant", story(rng, tale))]
            parts_told = 0
    return messages


def asked(rng: Random, template: str) -> str:
    return as_typed(rng, fill(rng, template))


MORE = (
    "[And then?|And then?|And then what?|What happened next?|What happened then?|Go on.|Continue.|Continue the story."
    "|Tell me more.|More, please.|What happens next?|Please go on.|And after that?|Keep going.|How does it go on?]"
)


def shorter(rng: Random, tale: Tale) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.7:
        wish = (
            "[Make it shorter.|Shorter, please.|Can you make it shorter?|Make it short.|Summarise it.|Sum it up."
            "|Can you summarise the story?|Tell it in three sentences.|Too long.|That was too long, make it shorter.]"
        )
        return wish, short_story(rng, tale)
    if kind < 0.85:
        return (
            "[In one sentence?|Tell it in one sentence.|Even shorter.|One sentence, please.]",
            one_sentence(rng, tale),
        )
    wish = "[Give it a title.|What is the title?|What is it called?|What would you call this story?|Title?]"
    return wish, f'{pick(rng, ["", "", "I call it "])}"{title(tale, rng)}".'


def changed(rng: Random, tale: Tale) -> tuple[Tale, str]:
    """Changes one thing of a tale; returns it with the wish that asks for the change."""
    kind = int(rng.random() * 7)
    if kind == 0:
        mood = pick(rng, [mood for mood in MOODS if mood != tale.mood])
        word = pick(rng, MOODS[mood][0])
        wish = f"[Make it [more |]{word}.|Now tell it as {a(word + ' story')}.|Can you make it {word}?|Now {a(word)} one.]"
        return replace(tale, mood=mood, length="normal"), wish
    if kind == 1:
        name = any_name(rng)
        wish = f"[Change the name to {name}.|Call {{him}} {name} instead.|Please use the name {name}.]"
        return replace(tale, name=name), wish.replace("{him}", "her" if tale.sex == "she" else "him")
    if kind == 2:
        hero = any_hero(rng)
        wish = f"[Make it about {a(hero)} instead.|The same with {a(hero)}.|Now with {a(hero)}.|Can it be about {a(hero)}?]"
        return replace(tale, hero=hero, trait=""), wish
    if kind == 3:
        place = any_place(rng)
        where = f"{place.preposition} {place.first}"
        wish = f"[Can it happen {where}?|Let it happen {where}.|Set it {where} instead.|The same story {where}, please.]"
        return replace(tale, place=place), wish
    if kind == 4:
        wish = "[Make it longer.|Longer, please.|Tell it with more detail.|I want a longer version.]"
        return replace(tale, length="long"), wish
    if kind == 5:
        wish = "[Another one.|Another story, please.|Tell me another one.|Another one, please!|A different story, please.]"
        return new_tale(rng, Spec()), wish
    spec = new_spec(rng)
    return new_tale(rng, spec), request(rng, spec)


Question = Callable[[Random, Tale], tuple[str, str]]


def ask_name(_rng: Random, tale: Tale) -> tuple[str, str]:
    her = "her" if tale.sex == "she" else "his"
    question = (
        f"[What was {her} name?|What was {her} name?|What was the name of the {tale.hero}?|What is the {tale.hero} called?"
        f"|What was the {tale.hero}'s name?|Who is the hero?|{upper_first(her)} name?|How was the {tale.hero} called?]"
    )
    return question, f"[{upper_first(her)} name was {tale.name}.|The {tale.hero} was called {tale.name}.]"


def ask_friend(_rng: Random, tale: Tale) -> tuple[str, str]:
    return (
        f"[Who helped {tale.name}?|Who helped the {tale.hero}?|Who was the friend?|Who was {tale.friend_name}?"
        f"|Who is {tale.friend_name}?|And the other one, who was that?]",
        f"[It was {tale.friend_name} the {tale.friend}.|{tale.friend_name} was {a(tale.friend)}.]",
    )


def ask_friend_name(_rng: Random, tale: Tale) -> tuple[str, str]:
    question = f"[What was the name of the {tale.friend}?|What was the {tale.friend} called?|And the {tale.friend}'s name?]"
    return question, f"[The {tale.friend} was called {tale.friend_name}.|{tale.friend_name}.]"


def ask_place(_rng: Random, tale: Tale) -> tuple[str, str]:
    live = "she" if tale.sex == "she" else "he"
    where = f"{tale.place.preposition} {tale.place.first}"
    return (
        f"[Where did it happen?|Where was that?|Where did {live} live?|Where did the {tale.hero} live?|Where does it take place?]",
        f"[It happened {where}.|{tale.name} lived {where}.|{upper_first(where)}.]",
    )


def ask_hero(_rng: Random, tale: Tale) -> tuple[str, str]:
    hero = f"{tale.trait} {tale.hero}".strip()
    return (
        f"[Who was {tale.name}?|Who is {tale.name}?|What was {tale.name}?|Who was it about?|Who is the story about?]",
        f"[{tale.name} was {a(hero)}.|It was about {tale.name}, {a(hero)}.]",
    )


def ask_lesson(rng: Random, tale: Tale) -> tuple[str, str]:
    lesson = fill(rng, tale.plot.lesson)
    return (
        "[What is the moral?|What do we learn from it?|What does the story teach us?|What is the lesson?|And the moral?]",
        f"[|The story shows this: |I think it is this: ]{lesson}",
    )


def ask_thing(_rng: Random, tale: Tale) -> tuple[str, str]:
    if not (tale.plot.uses_object or tale.shows_thing) or tale.length == "short":
        return ask_name(_rng, tale)
    return (
        f"[Was there a thing that mattered?|What object was in the story?|Which thing was important?|What did {tale.name} have?]",
        f"[It was {a(tale.thing)}.|There was {a(tale.thing)} in it.]",
    )


def say_liked(_rng: Random, tale: Tale) -> tuple[str, str]:
    return (
        "[I liked it.|That was nice.|What a lovely story!|Great story, thank you!|Beautiful.|I love it!|Nice story.]",
        f"[I am glad you liked it.|Thank you! I like {tale.name} too.|That makes me happy.]"
        "[| Shall I tell you another one?| Would you like to know what happened next?]",
    )


def say_disliked(_rng: Random, _tale: Tale) -> tuple[str, str]:
    return (
        "[I did not like it.|That was boring.|Boring.|I don't like this story.|That was a bad story.]",
        "I am sorry. [Shall I tell it differently|Shall I tell you another one|Would you like a funny one instead]?",
    )


def recall(rng: Random) -> list[Message]:
    """The user tells a sentence or two and asks what was in it: dense practice in reading names and places back."""
    tale = replace(new_tale(rng, new_spec(rng)), length="short")
    told = fill(rng, pick(rng, OPENINGS), Slots(rng, tale, plain=True))
    messages: list[Message] = []
    for number, ask in enumerate(rng.sample([ask_name, ask_place, ask_hero], 1 + int(rng.random() * 3))):
        question, answer = ask(rng, tale)
        question = asked(rng, question)
        messages += [
            ("user", f"{told} {question}" if number == 0 else question),
            ("assistant", fill(rng, answer)),
        ]
    return messages


QUESTIONS: list[Question] = [
    ask_name, ask_name, ask_name, ask_friend, ask_friend_name, ask_place, ask_place, ask_hero, ask_lesson, ask_thing, say_liked,
    say_disliked,
]  # fmt: skip
