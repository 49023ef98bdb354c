# ruff: noqa: E501, SIM905 (word lists and templates: a line per thought)
"""What the model does not know, and how it says so."""

from random import Random

from lab.demo.facts import CAPITALS
from lab.demo.grammar import a, as_typed, chance, fill, pick, upper_first
from lab.demo.tokenizer import Message
from lab.demo.words import HE_NAMES, SHE_NAMES, invented_stem


def items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";")]


PEOPLE = items("""Napoleon;Albert Einstein;Isaac Newton;Leonardo da Vinci;Cleopatra;Julius Caesar;Marie Curie;Mozart;Beethoven;
Shakespeare;Charles Darwin;Galileo;Plato;Aristotle;Alexander the Great;Queen Victoria;Abraham Lincoln;George Washington;
Nelson Mandela;Gandhi;Picasso;Van Gogh;Charlie Chaplin;Elvis Presley;Alan Turing;Ada Lovelace;Nikola Tesla;Thomas Edison;
Neil Armstrong;Marco Polo;Columbus;Bach;Kant;Goethe;Tolstoy;Jane Austen;Charles Dickens;Mark Twain;the president;the king of
Spain;the prime minister;Taylor Swift;Elon Musk;Michael Jordan;Messi;Ronaldo;the pope""")
SUBJECTS = items("""quantum physics;the French Revolution;the Roman Empire;black holes;climate change;the stock market;photosynthesis;
DNA;evolution;inflation;blockchain;Bitcoin;the Second World War;the First World War;relativity;calculus;organic chemistry;
nuclear fusion;the Middle Ages;ancient Egypt;the immune system;plate tectonics;vaccines;machine learning theory;jazz;opera;
baroque music;impressionism;Buddhism;philosophy;psychology;economics;politics;the law;taxes;mortgages;insurance;medicine;
cancer;diabetes;aspirin;astronomy;geology;string theory;cryptography;SQL;JavaScript;Kubernetes;Docker;Linux;the Cold War;the
Vikings;the Aztecs;samba;cricket rules;baseball;golf;the Olympic Games;the World Cup;the Bible;Greek mythology;car engines;
airplanes;submarines;nanotechnology;superconductors;the big bang;dark matter;neurons;hormones;antibiotics;the periodic table;
thermodynamics;democracy;the United Nations;NASA;Hollywood;anime;video games;chess openings;knitting;origami;wine;coffee
roasting;sourdough;yoga;marathons;the brain;the heart;enzymes;prime numbers;topology;group theory""")
THINGS = items(
    """a car;a laptop;a phone;gold;bread;a house;a ticket to Paris;Apple stock;Bitcoin;petrol;a flight to London;milk"""
)
LANGUAGES = "French German Spanish Italian Chinese Japanese Russian Latin Arabic Portuguese Dutch Greek Polish".split()
PROGRAMS = items("""a Python program;a website;some code;a sorting algorithm in Python;a function that reverses a string;an SQL query;
a regular expression;a JavaScript function;a shell script;a C++ class;an essay;an essay about history;my homework;a letter to
my boss;a business plan;a cover letter;a thesis;a legal contract;a news article;a novel;a speech;a report""")
OTHER_CAPITALS = """Mongolia Nepal Bolivia Paraguay Uruguay Tunisia Angola Zambia Senegal Malta Fiji Jamaica Panama Nicaragua
Honduras Kazakhstan Uzbekistan Georgia Armenia Laos Cambodia Malaysia Bhutan Qatar Oman Yemen Libya Sudan Chad Niger Togo Benin
Gabon Botswana Namibia Mozambique Madagascar Somalia Uganda Rwanda Samoa Tonga Ecuador Guyana Suriname Haiti""".split()
PRIZES = items("""the World Cup in 1990;the World Cup in 2014;the Olympic marathon in 1960;the Oscar in 1995;the Nobel Prize in 1921;the
election;the last match;the battle of Hastings;the Tour de France;the chess championship;Wimbledon in 1980""")
MADE_THINGS = items(
    "the telephone;the light bulb;the radio;penicillin;the steam engine;the printing press;the computer;America;the Mona Lisa;Hamlet;War and Peace;the Eiffel Tower;Google;television"
)

REFUSALS = [
    "I am a very small model and I do not know {x}. [Ask me for a story instead!|I am better at stories.|Sorry!|But I can tell you a story.]",
    "I am sorry, I do not know {x}. [I am only a small model.|I am too small for that.|I am better at stories and at questions about Penstock.]",
    "I do not know {x}. [I am a very small model.|A larger model would.|That is more than I have learnt.] [I can tell you a story, if you like.|I know stories, small sums and how Penstock works.|]",
    "That is beyond me, I do not know {x}. [Would you like a story instead?|I am a very small model.]",
]
REFUSALS_TO_DO = [
    "I am a very small model and cannot {x}. [I can tell you a story, if you like.|Sorry!|I am better at stories.]",
    "I am sorry, I cannot {x}. [I am too small for that.|I tell stories, do small sums and explain Penstock.]",
]


CHOICES = {
    "thing": THINGS, "prize": PRIZES, "made": MADE_THINGS, "country": [*CAPITALS, *OTHER_CAPITALS],
    "language": LANGUAGES, "work": PROGRAMS,
}  # fmt: skip
SUBJECT = ("[Explain {subject}.|What is {subject}?|How does {subject} work?|Tell me about {subject}.|What do you know about {subject}?|Can you explain {subject} to me?]",
           "much about {subject}|enough about {subject}|anything about {subject}")  # fmt: skip
BEYOND = [
    ("[Who was|Who is|Tell me about|What do you know about] {person}[?||]", "much about {person}|anything about {person}"),
    ("[When was {person} born?|When did {person} live?|When did {person} die?]", "when {person} lived"),
    SUBJECT,
    SUBJECT,
    ("[What happened in {year}?|What happened in the year {year}?|Which important things happened in {year}?]", "what happened in {year}"),
    ("[How much does {thing} cost?|What is the price of {thing}?|How expensive is {thing}?|What does {thing} cost?]",
     "the price of {thing}|what {thing} costs"),
    ("[What is the capital of {country}?|Capital of {country}?|The capital of {country}?|Do you know the capital of {country}?]",
     "the capital of {country}"),
    ("[Who won {prize}?|Do you know who won {prize}?]", "who won {prize}"),
    ("[Who invented|Who made|Who discovered] {made}?", "who [invented|made|discovered] {made}"),
    ("[How many people live in {country}?|What is the population of {country}?]", "how many people live in {country}"),
    ("[What is {a_word}?|What does {word} mean?|What is a {word} for?]", "what {a_word} is|the word {word}"),
    ('[Translate this into {language}.|Can you speak {language}?|Say hello in {language}.|How do you say good morning in {language}?|Translate "the cat sleeps" into {language}.]',
     "speak {language}"),
    ("[Write|Can you write|Please write|Write me|I need] {work}[.||]", "write {work}"),
    ("[What is|How much is|Calculate|] {x} {sign} {y}[?|]", "work with numbers as large as {x}|do sums with such large numbers"),
]  # fmt: skip
CAPITAL, WORD, FIRST_TO_DO, SUM = 6, 10, 11, 13
PLACE = (
    "[Where is {country}?|Tell me about {country}.|What do you know about {country}?]",
    "much about {country}",
)


def ask(rng: Random) -> tuple[str, str, bool]:
    """A question beyond the model, what it is about, and whether it is something to do."""
    kind = int(rng.random() * len(BEYOND))
    question, about = BEYOND[kind]
    slots = {
        "person": pick(rng, PEOPLE),
        "subject": pick(rng, SUBJECTS),
        "year": str(1000 + int(rng.random() * 1030)),
    }
    if kind == CAPITAL:
        slots["country"] = pick(rng, OTHER_CAPITALS) if chance(rng, 0.7) else upper_first(any_word(rng))
        question, about = (question, about) if chance(rng, 0.7) else PLACE
    elif kind == WORD:
        word = any_word(rng)
        slots |= {"word": word, "a_word": a(word)}
    elif kind == SUM:
        slots |= {name: str(100 + int(rng.random() * 9900)) for name in "xy"}
        slots["sign"] = pick(rng, ["*", "+", "-", "divided by", "times"])
    for name, options in CHOICES.items():
        if name not in slots and f"{{{name}}}" in question:
            slots[name] = pick(rng, options)
    return question.format_map(slots), about.format_map(slots), kind >= FIRST_TO_DO


def any_word(rng: Random) -> str:
    return invented_stem(int(rng.random() * 1e6))


def refusal(rng: Random) -> list[Message]:
    question, about, to_do = ask(rng)
    slots = {"x": fill(rng, pick(rng, about.split("|")) if "[" not in about else about)}
    answer = fill(rng, pick(rng, REFUSALS_TO_DO if to_do else REFUSALS), slots)
    return [("user", as_typed(rng, upper_first(fill(rng, question).strip()))), ("assistant", answer.strip())]


def personal(rng: Random) -> list[Message]:
    """Questions about the user that only the user can answer."""
    person = pick(rng, ["mother", "father", "dog", "cat", "sister", "brother", "teacher", "best friend"])
    question, about = pick(rng, [
        (f"What is the name of my {person}?", f"the name of your {person}"),
        (f"How old is my {person}?", f"how old your {person} is"),
        (f"Where is my {person}?", f"where your {person} is"),
        ("What is my name?", "your name"), ("How old am I?", "how old you are"),
        ("What did I eat today?", "what you ate today"), ("Where do I live?", "where you live"),
        (f"Do you know {pick(rng, SHE_NAMES + HE_NAMES)}?", "anybody outside of my stories"),
    ])  # fmt: skip
    reply = (
        "I do not know {about}, [because you have not told me|you have not told me yet]. [Will you tell me?|]"
    )
    if about.startswith("anybody"):
        reply = "I do not know {about}. [Who is it?|Tell me more!]"
    return [("user", as_typed(rng, question)), ("assistant", fill(rng, reply, {"about": about}).strip())]


def any_unknown(rng: Random) -> list[Message]:
    return personal(rng) if chance(rng, 0.12) else refusal(rng)
