# ruff: noqa: E501 (templates: a line per thought)
"""Small talk, jokes, riddles, poems, advice, and repeating after somebody."""

from random import Random

from demo.grammar import a, as_typed, chance, fill, phrases, pick, sentence_list, upper_first
from demo.tokenizer import Message
from demo.words import HE_NAMES, HEROES, OBJECTS, PLACES, SHE_NAMES, invented_stem

NO_CLOCK = "I have no clock and no calendar, so I do not know. [Your computer can tell you.|Sorry!]"
_PHRASES = phrases("talk")
EXCHANGES: list[tuple[str, str]] = [tuple(each) for each in _PHRASES["exchanges"]]
"""Both sides are templates."""
JOKES: list[str] = _PHRASES["jokes"]
RIDDLES: list[tuple[str, str]] = [tuple(each) for each in _PHRASES["riddles"]]
POEMS: dict[str, str] = _PHRASES["poems"]
ADVICE: dict[str, str] = _PHRASES["advice"]


def small_talk(rng: Random) -> list[Message]:
    question, answer = pick(rng, EXCHANGES)
    return turn(rng, fill(rng, question), fill(rng, answer))


def turn(rng: Random, question: str, answer: str) -> list[Message]:
    return [("user", as_typed(rng, question)), ("assistant", answer.strip())]


def joke(rng: Random) -> list[Message]:
    question = "[Tell me a joke.|Do you know a joke?|A joke, please.|Make me laugh.|Say something funny.|Another joke.|Joke?]"
    messages = turn(rng, fill(rng, question), pick(rng, JOKES))
    if chance(rng, 0.2):
        messages += turn(
            rng, fill(rng, "[Haha|Ha ha|That was funny|lol|Good one][.|!|]"), "I am glad you laughed."
        )
    return messages


def riddle(rng: Random) -> list[Message]:
    question, solution = pick(rng, RIDDLES)
    ask = "[Tell me a riddle.|Do you know a riddle?|A riddle, please.|Give me a riddle.|Riddle me something.]"
    messages = turn(rng, fill(rng, ask), question)
    kind = rng.random()
    if kind < 0.4:
        reply = fill(
            rng, "[I don't know.|What is it?|Tell me the answer.|I give up.|No idea.|What is the answer?]"
        )
        return messages + turn(rng, reply, f"{solution}!")
    if kind < 0.7:
        return messages + turn(rng, f"{solution}{fill(rng, '[?|!|.|]')}", f"Yes, that is right! {solution}.")
    other = pick(rng, [thing for _, thing in RIDDLES if thing != solution])
    return messages + turn(
        rng, f"{other}?", f"No, it is not that. It is {solution[0].lower() + solution[1:]}."
    )


def poem(rng: Random) -> list[Message]:
    if chance(rng, 0.25):
        return turn(
            rng, fill(rng, "[Write|Tell me|Recite|I want] a [short |]poem."), pick(rng, list(POEMS.values()))
        )
    about, text = pick(rng, list(POEMS.items()))
    ask = "[Write [me |]a [short |]poem about {about}.|A poem about {about}, please.|Do you know a poem about {about}?|Can you write a poem about {about}?]"
    return turn(rng, fill(rng, ask, {"about": about}), text)


def advice(rng: Random) -> list[Message]:
    goal, way = pick(rng, list(ADVICE.items()))
    ask = "[How can I {goal}?|How do I {goal}?|I want to {goal}.|What can I do to {goal}?|Any advice? I want to {goal}.|How to {goal}?]"
    start = fill(rng, "[|Here is what I would do: |My advice: |Try this: ]")
    return turn(rng, fill(rng, ask, {"goal": goal}), f"{start}{way if start else upper_first(way)}.")


def repeat(rng: Random) -> list[Message]:
    """Repeating is copying, and practice in copying makes better stories."""
    words = random_phrase(rng)
    ask = pick(
        rng,
        ["Repeat after me: {}", "Say: {}", "Please repeat: {}", 'Say "{}".', "Repeat this: {}", "Echo: {}"],
    )
    return [("user", ask.format(words)), ("assistant", words)]


def random_phrase(rng: Random) -> str:
    if chance(rng, 0.5):
        return " ".join(any_word(rng) for _ in range(3 + int(rng.random() * 32)))
    kind = int(rng.random() * 4)
    if kind == 0:
        return sentence_list([a(pick(rng, OBJECTS)) for _ in range(1 + int(rng.random() * 4))])
    if kind == 1:
        return f"the {pick(rng, HEROES)} {pick(rng, ['sings', 'sleeps', 'runs', 'laughs', 'waits'])} {place_phrase(rng)}"
    if kind == 2:
        return sentence_list([pick(rng, SHE_NAMES + HE_NAMES) for _ in range(1 + int(rng.random() * 4))])
    number = str(int(rng.random() * 10 ** (1 + int(rng.random() * 6))))
    return f"{number} {pick(rng, OBJECTS)}" if chance(rng, 0.5) else number


def any_word(rng: Random) -> str:
    kind = int(rng.random() * 4)
    if kind == 3:
        return invented_stem(int(rng.random() * 1e6))
    return pick(rng, (HEROES, OBJECTS, SHE_NAMES + HE_NAMES)[kind])


def place_phrase(rng: Random) -> str:
    preposition, first, _, _ = pick(rng, PLACES)
    return f"{preposition} {first}"


def introduction(rng: Random) -> list[Message]:
    """The user's name or favourite thing, asked back later."""
    name, thing = pick(rng, SHE_NAMES + HE_NAMES), pick(rng, OBJECTS)
    greeting = fill(
        rng,
        f"[Hello {name}|Nice to meet you, {name}|Hi {name}]! [How can I help you?|What can I do for you?]",
    )
    messages: list[Message] = [
        (
            "user",
            fill(
                rng,
                f"[My name is {name}.|I am {name}.|Hi, I'm {name}.|Hello, my name is {name}!|Call me {name}.]",
            ),
        ),
        ("assistant", greeting),
    ]
    if chance(rng, 0.5):
        messages += turn(
            rng,
            f"I have {a(thing)}.",
            fill(rng, f"[How nice, {a(thing)}!|{upper_first(a(thing))}? That is lovely.]"),
        )
        if chance(rng, 0.6):
            messages += turn(
                rng, fill(rng, "[What do I have?|What did I say I have?]"), f"You have {a(thing)}."
            )
    if chance(rng, 0.7):
        ask = "[What is my name?|Do you remember my name?|What's my name?|Who am I?]"
        messages += turn(rng, fill(rng, ask), fill(rng, f"[Your name is {name}.|You are {name}.]"))
    return messages


def any_talk(rng: Random) -> list[Message]:
    kinds = [small_talk] * 9 + [joke, riddle, poem, advice, advice, introduction]
    return pick(rng, kinds)(rng)
