# ruff: noqa: E501, SIM905 (word lists and templates: a line per thought)
"""Simple facts and small sums."""

from collections.abc import Callable
from random import Random
from zlib import crc32

from lab.demo.grammar import a, as_typed, chance, fill, pick, sentence_list, upper_first
from lab.demo.tokenizer import Message
from lab.demo.words import OBJECTS, invented_stem


def pairs(text: str) -> dict[str, str]:
    """ "key value; key value" with the last word of each as its value; an underscore is a space."""
    items = [item.split() for item in text.replace("\n", " ").split(";")]
    return {" ".join(words[:-1]): words[-1].replace("_", " ") for words in items if words}


CAPITALS = pairs("""France Paris; Germany Berlin; Italy Rome; Spain Madrid; Portugal Lisbon; England London; Scotland
Edinburgh; Ireland Dublin; Wales Cardiff; the Netherlands Amsterdam; Belgium Brussels; Austria Vienna; Switzerland Bern;
Poland Warsaw; Denmark Copenhagen; Norway Oslo; Sweden Stockholm; Finland Helsinki; Iceland Reykjavik; Greece Athens; Turkey
Ankara; Hungary Budapest; Romania Bucharest; Bulgaria Sofia; Croatia Zagreb; Serbia Belgrade; Ukraine Kyiv; Russia Moscow;
Egypt Cairo; Morocco Rabat; Kenya Nairobi; Nigeria Abuja; Ghana Accra; Ethiopia Addis_Ababa; Japan Tokyo; China Beijing;
India New_Delhi; South Korea Seoul; Thailand Bangkok; Vietnam Hanoi; Indonesia Jakarta; Australia Canberra; New Zealand
Wellington; Canada Ottawa; the United States Washington; Mexico Mexico_City; Cuba Havana; Brazil Brasilia; Argentina
Buenos_Aires; Chile Santiago; Peru Lima; Colombia Bogota; the Czech Republic Prague; Slovakia Bratislava; Estonia Tallinn;
Latvia Riga; Lithuania Vilnius; Israel Jerusalem; Iran Tehran; Iraq Baghdad""")
COLOURS = pairs("""the sky blue; grass green; a banana yellow; snow white; a tomato red; coal black; a carrot orange; the sun
yellow; a lemon yellow; an elephant grey; a polar bear white; blood red; chocolate brown; a frog green; the sea blue; a
strawberry red; a flamingo pink; a raven black; milk white; a violet purple; an orange orange; a lime green; gold yellow""")
SOUNDS = pairs("""a dog barks; a cat meows; a cow moos; a sheep bleats; a duck quacks; a lion roars; a horse neighs; a pig
grunts; a frog croaks; a bee buzzes; an owl hoots; a wolf howls; a mouse squeaks; a snake hisses; a rooster crows; a bird
sings; a donkey brays; a goat bleats; a lamb bleats; a crow caws""")
LEGS = pairs("""a dog four; a cat four; a spider eight; an ant six; a bird two; a bee six; a horse four; a human two; a snake
no; a fish no; an octopus eight; a chicken two; a cow four; a butterfly six; a table four; a crab ten; a frog four; an owl
two; a beetle six; a worm no; an elephant four""")
BABIES = pairs("""a dog puppy; a cat kitten; a cow calf; a horse foal; a sheep lamb; a pig piglet; a hen chick; a duck
duckling; a goose gosling; a frog tadpole; a bear cub; a lion cub; a deer fawn; a kangaroo joey; a goat kid; an owl owlet""")
HOMES = pairs("""a bird nest; a bee hive; a spider web; a dog kennel; a rabbit burrow; a bear den; a horse stable; a fox den;
an ant anthill; a king castle; a snail shell; a hen coop; a beaver lodge; a cow barn; a pig sty""")
OPPOSITES = pairs("""hot cold; big small; tall short; fast slow; happy sad; old young; light dark; day night; up down; left
right; open closed; full empty; hard soft; wet dry; early late; good bad; rich poor; strong weak; loud quiet; clean dirty;
near far; high low; heavy light; thick thin; wide narrow; deep shallow; first last; begin end; love hate; friend enemy; war
peace; true false; always never; sweet sour; brave cowardly; kind cruel; easy difficult; cheap expensive; inside outside;
summer winter; north south; east west; black white; win lose; buy sell; push pull; give take; laugh cry; remember forget;
in out; before after; more less; hello goodbye; yes no; long short; smooth rough; awake asleep; alive dead; safe dangerous""")
DEFINITIONS = dict(
    item.strip().split(": ")
    for item in """a baker: a person who makes bread and cakes; a castle: a large strong building where kings and queens lived;
a river: a long stream of water that flows to the sea; an island: a piece of land with water all around it; a desert: a dry
place with very little rain; a volcano: a mountain that can throw out hot rock; a planet: a large round body that goes around
a star; a star: a huge ball of hot glowing gas; the moon: a ball of rock that goes around the Earth; a cloud: a lot of tiny
drops of water in the sky; a rainbow: a coloured arc that you see when the sun shines on rain; a compass: a tool that shows
where north is; a clock: a thing that shows the time; a lighthouse: a tower with a light that guides ships; a bridge: a way
across a river or a road; a bicycle: a vehicle with two wheels and pedals; a telescope: a tool for looking at things far away;
a library: a place with many books that you may borrow; a school: a place where people learn; a doctor: a person who helps
sick people; a farmer: a person who grows food and keeps animals; a teacher: a person who helps others learn; a poem: a short
text that plays with words and sounds; a song: words that are sung to a tune; a dragon: a large creature from stories that
breathes fire; a unicorn: a horse from stories with one horn; a mermaid: a sea creature from stories, half woman and half
fish; a giant: a very large person from stories; a whale: a very large animal that lives in the sea and breathes air; a bat:
a small animal that flies at night; a bee: an insect that makes honey; an owl: a bird that hunts at night; a spider: an animal
with eight legs that spins webs; a computer: a machine that follows instructions very fast; a program: a list of instructions
for a computer; the internet: a network that connects computers all over the world; a robot: a machine that can do work by
itself; a forest: a large place full of trees; a seed: a small thing from which a plant grows; a map: a picture that shows
where things are; a friend: someone you like and can trust; a storm: very bad weather with strong wind; winter: the coldest
time of the year; a mirror: a piece of glass in which you can see yourself; a piano: a large instrument with black and white
keys; a violin: a small instrument with four strings and a bow; a turbine: a wheel that is turned by flowing water, steam or
wind; a dam: a wall that holds back water; electricity: a kind of energy that runs lamps and machines; gravity: the force that
pulls things down to the ground; ice: frozen water; steam: water that has become a gas; honey: a sweet food made by bees;
a museum: a place where you can look at old or beautiful things; a market: a place where people buy and sell things"""
    .replace("\n", " ").split(";")
)  # fmt: skip
GROUPS = {
    "fruits": "apple banana cherry pear plum orange lemon grape mango peach",
    "vegetables": "carrot potato onion tomato cabbage pea bean pumpkin leek spinach",
    "animals": "dog cat horse cow lion tiger bear fox rabbit elephant",
    "birds": "owl sparrow eagle raven duck swan robin crow parrot penguin",
    "colours": "red blue green yellow white black orange purple pink brown",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "days of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "months": "January February March April May June July August September October November December",
    "seasons": "spring summer autumn winter",
    "trees": "oak birch pine maple willow apple cherry beech ash elm",
    "flowers": "rose tulip daisy lily violet sunflower poppy orchid",
    "tools": "hammer saw drill screwdriver ladder spade axe file",
    "instruments": "piano violin flute drum guitar trumpet harp cello",
    "countries": "France Germany Italy Spain Japan China India Brazil Canada Egypt",
    "cities": "Paris London Berlin Rome Tokyo Madrid Cairo Oslo Vienna Lima",
    "sports": "football tennis swimming running cycling skiing rowing chess",
    "drinks": "water tea coffee milk juice lemonade cocoa",
    "insects": "bee ant butterfly beetle fly wasp ladybird moth",
    "shapes": "circle square triangle rectangle star oval",
    "metals": "gold silver iron copper tin lead zinc",
    "oceans": "Atlantic Pacific Indian Arctic Southern",
    "continents": "Africa Asia Europe Australia Antarctica",
    "fish": "salmon tuna trout herring cod shark eel carp",
    "jobs": "baker teacher doctor farmer painter pilot cook gardener",
}
SMALL = "zero one two three four five six seven eight nine ten eleven twelve".split()
ORDERED = ["days of the week", "months", "planets"]
ODDS = [
    ("How many [days are there in a week|days does a week have]?", "A week has seven days."),
    ("How many [months are there in a year|months does a year have]?", "A year has twelve months."),
    ("How many [days are there in a year|days does a year have]?", "A year has 365 days, and a leap year has 366."),
    ("How many [hours are there in a day|hours does a day have]?", "A day has 24 hours."),
    ("How many [minutes are there in an hour|minutes does an hour have]?", "An hour has 60 minutes."),
    ("How many [seconds are there in a minute|seconds does a minute have]?", "A minute has 60 seconds."),
    ("How many [letters are in the alphabet|letters does the alphabet have]?", "The English alphabet has 26 letters."),
    ("How many [planets are there|planets are in the solar system]?", "There are eight planets in our solar system."),
    ("How many [continents are there]?", "There are seven continents."),
    ("[What is|Which is] the [largest|biggest] planet?", "Jupiter is the largest planet."),
    ("[What is|Which is] the smallest planet?", "Mercury is the smallest planet."),
    ("[What is|Which is] the [largest|biggest] animal?", "The blue whale is the largest animal."),
    ("[What is|Which is] the fastest animal[ on land|]?", "The cheetah is the fastest animal on land."),
    ("[What is|Which is] the tallest animal?", "The giraffe is the tallest animal."),
    ("[What is|Which is] the [highest|tallest] mountain?", "Mount Everest is the highest mountain."),
    ("[What is|Which is] the [largest|biggest] ocean?", "The Pacific is the largest ocean."),
    ("Which is the red planet?", "Mars is the red planet."), ("Which planet do we live on?", "We live on the Earth."),
    ("Why is the sky blue?", "Because the air scatters blue light more than red light."),
    ("Why does it rain?", "Water rises into the air, becomes clouds, and falls down again as rain."),
    ("Why do [we|people] sleep?", "Sleep gives the body and the mind time to rest."),
    ("Why do leaves fall[ in autumn|]?", "Trees let their leaves go in autumn to save water and strength in winter."),
    ("How do birds fly?", "Birds beat their wings, and the air under the wings lifts them up."),
    ("How do fish breathe?", "Fish breathe with gills, which take oxygen from the water."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows eat?", "Cows eat grass and hay."), ("What do rabbits eat?", "Rabbits eat grass, leaves and carrots."),
    ("What do [pandas|panda bears] eat?", "Pandas eat bamboo."), ("What do cats eat?", "Cats eat meat and fish."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("When does water [freeze|turn to ice]?", "Water freezes at zero degrees Celsius."),
    ("When does water boil?", "Water boils at one hundred degrees Celsius."),
    ("Is the [Earth|earth] [flat|round]?", "The Earth is round, almost like a ball."),
    ("Is the sun a [star|planet]?", "The sun is a star."),
    ("Which season comes after [winter]?", "Spring comes after winter."),
    ("Which season comes after summer?", "Autumn comes after summer."),
    ("What comes after spring?", "Summer comes after spring."),
    ("Where does the sun rise?", "The sun rises in the east."), ("Where does the sun set?", "The sun sets in the west."),
    ("What is bread made of?", "Bread is made of flour, water, salt and yeast."),
    ("What is cheese made of?", "Cheese is made of milk."), ("What is paper made of?", "Paper is made of wood."),
    ("What is glass made of?", "Glass is made of sand."),
    ("Do penguins live at the North Pole?", "No, penguins live in the south. Polar bears live at the North Pole."),
    ("Can penguins fly?", "No, penguins cannot fly, but they swim very well."),
]  # fmt: skip

Fact = Callable[[Random], tuple[str, str]]


def lookup(table: dict[str, str], question: str, answer: str) -> Fact:
    def fact(rng: Random) -> tuple[str, str]:
        key, value = pick(rng, list(table.items()))
        slots = {
            "key": key,
            "Key": upper_first(key),
            "value": value,
            "Value": upper_first(value),
            "a_value": a(value),
        }
        return fill(rng, question, slots), fill(rng, answer, slots)

    return fact


def opposite(rng: Random) -> tuple[str, str]:
    first, second = pick(rng, list(OPPOSITES.items()))
    if chance(rng, 0.4) and list(OPPOSITES.values()).count(second) == 1 and second not in OPPOSITES:
        first, second = second, first
    ask = f"[What is the opposite of|The opposite of|Opposite of|Tell me the opposite of] {first}?"
    return fill(rng, ask), f"The opposite of {first} is {second}."


def listing(rng: Random) -> tuple[str, str]:
    group, names = pick(rng, list(GROUPS.items()))
    members = names.split()
    count = min(len(members), 2 + int(rng.random() * 5))
    word = SMALL[count] if chance(rng, 0.6) else str(count)
    if group in ORDERED and chance(rng, 0.6):
        ask = f"[What are the {group}?|Name all the {group}.|List the {group}.|Name the {group}.]"
        return fill(rng, ask), f"The {group} are {sentence_list(members)}."
    chosen = rng.sample(members, count)
    ask = f"[Name|List|Tell me|Give me|Can you name|Name me] {word} {group}."
    if chance(rng, 0.3):
        return fill(rng, ask), "\n".join(f"{n}. {upper_first(member)}" for n, member in enumerate(chosen, 1))
    return fill(rng, ask), upper_first(sentence_list(chosen)) + "."


def neighbour(rng: Random) -> tuple[str, str]:
    members = GROUPS[pick(rng, ["days of the week", "months"])].split()
    at = int(rng.random() * len(members))
    if chance(rng, 0.5):
        ask = f"[What comes after|Which comes after|What is after] {members[at]}?"
        return fill(rng, ask), f"After {members[at]} comes {members[(at + 1) % len(members)]}."
    return f"What comes before {members[at]}?", f"Before {members[at]} comes {members[at - 1]}."


def counting(rng: Random) -> tuple[str, str]:
    first = 1 if chance(rng, 0.6) else int(rng.random() * 60)
    last = first + 2 + int(rng.random() * 12)
    ask = f"[Count from {first} to {last}.|Can you count from {first} to {last}?|Count {first} to {last}.]"
    if first == 1:
        ask = f"[{ask}|Count to {last}.|Can you count to {last}?]"
    return fill(rng, ask), ", ".join(map(str, range(first, last + 1))) + "."


def spelling(rng: Random) -> tuple[str, str]:
    word = pick(
        rng, [*GROUPS["animals"].split(), *GROUPS["fruits"].split(), *pick(rng, OBJECTS).split(), *SMALL]
    )
    if chance(rng, 0.3):
        word = invented_stem(int(rng.random() * 1e6))
    ask = f"[How do you spell {word}?|Spell {word}.|Spell the word {word}.|How is {word} spelt?]"
    return fill(rng, ask), "-".join(word)


def first_letter(rng: Random) -> tuple[str, str]:
    word = pick(rng, GROUPS[pick(rng, list(GROUPS))].split())
    ask = f"[What is the first letter of {word}?|What letter does {word} start with?]"
    return fill(rng, ask), f"The first letter of {word} is {word[0].upper()}."


def larger(rng: Random) -> tuple[str, str]:
    first, second = int(rng.random() * 100), int(rng.random() * 100)
    if first == second:
        second += 1
    word = pick(rng, ["larger", "bigger", "smaller"])
    answer = min(first, second) if word == "smaller" else max(first, second)
    return f"Which is {word}, {first} or {second}?", f"{answer} is {word} than {first + second - answer}."


def held_out(first: int, sign: str, second: int) -> bool:
    """One sum in thirty is never shown in training; the score asks for these."""
    return crc32(f"{first}{sign}{second}".encode()) % 30 == 0


def numbers(rng: Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return int(rng.random() * 13), int(rng.random() * 13)
    total = int(rng.random() * 101)
    if chance(rng, 0.3):
        total = int(rng.random() * 20)
    part = int(rng.random() * (total + 1))
    return (part, total - part) if sign == "+" else (total, part)


def working(first: int, sign: str, second: int) -> str:
    """The answer, with the steps in between where it takes more than one."""
    if sign == "*":
        return f"{first} times {second} is {first * second}."
    if sign == "+" and first > 9 and second > 9:
        tens, ones = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
        steps = f"{first // 10 * 10} + {second // 10 * 10} = {tens}, {first % 10} + {second % 10} = {ones}"
        return f"{steps}, and {tens} + {ones} = {tens + ones}. So {first} + {second} = {first + second}."
    if sign == "-" and second > 9 and second % 10:
        left = first - second // 10 * 10
        steps = f"{first} - {second // 10 * 10} = {left}, and {left} - {second % 10} = {first - second}"
        return f"{steps}. So {first} - {second} = {first - second}."
    return f"{first} {sign} {second} = {first + second if sign == '+' else first - second}."


SUM_ASKS = {
    "+": "[What is|What's|How much is|Calculate|Compute|||Please add:|Can you tell me what is] {x} [+|+|plus|and] {y}[?||]",
    "-": "[What is|What's|How much is|Calculate|Compute|||Can you tell me what is] {x} [-|-|minus] {y}[?||]",
    "*": "[What is|What's|How much is|Calculate|Compute||] {x} [*|x|times|times|multiplied by] {y}[?||]",
}


def one_sum(rng: Random) -> tuple[str, str]:
    while True:
        sign = pick(rng, "++--*")
        first, second = numbers(rng, sign)
        if not held_out(first, sign, second):
            return ask_sum(rng, first, sign, second), working(first, sign, second)


def ask_sum(rng: Random, first: int, sign: str, second: int) -> str:
    ask = fill(rng, SUM_ASKS[sign], {"x": str(first), "y": str(second)}).strip()
    return ask.replace(" + ", "+").replace(" - ", "-") if chance(rng, 0.15) else ask


def word_problem(rng: Random) -> tuple[str, str]:
    things = pick(rng, ["apples", "coins", "marbles", "books", "eggs", "pears", "shells", "stones"])
    who = pick(rng, ["I have", "You have", "Tom has", "Anna has", "Ben has", "Lily has"])
    total = 2 + int(rng.random() * 18)
    part = 1 + int(rng.random() * (total - 1))
    if chance(rng, 0.5):
        text = f"{who} {total} {things} and [eats|loses|gives away|sells] {part}. How many are left?"
        if who[0] in "IY":
            text = text.replace("[eats|loses|gives away|sells]", "[lose|give away|sell]")
        return fill(rng, text), f"{total} - {part} = {total - part}, so {total - part} {things} are left."
    more = "[find|get|buy]" if who[0] in "IY" else "[finds|gets|buys]"
    text = f"{who} {total - part} {things} and {more} {part} more. How many {things} are there[ now|]?"
    return fill(rng, text), f"{total - part} + {part} = {total}, so there are {total} {things}."


def odd(rng: Random) -> tuple[str, str]:
    question, answer = pick(rng, ODDS)
    return fill(rng, question), fill(rng, answer)


FACTS: list[Fact] = [
    lookup(CAPITALS, "[What is the capital of {key}?|What is the capital of {key}?|The capital of {key}?|Capital of {key}?|Which city is the capital of {key}?|Do you know the capital of {key}?]",
           "The capital of {key} is {value}."),
    lookup(CAPITALS, "[Which country has the capital {value}?|{Value} is the capital of which country?|In which country is {value}?|Where is {value}?]", "{Value} is the capital of {key}."),
    lookup(COLOURS, "[What colour is {key}?|Which colour does {key} have?|What is the colour of {key}?|What color is {key}?]", "{Key} is {value}."),
    lookup(SOUNDS, "[What sound does {key} make?|What does {key} say?|What noise does {key} make?]", "{Key} {value}."),
    lookup(LEGS, "[How many legs does {key} have?|How many legs has {key}?]", "{Key} has {value} legs."),
    lookup(BABIES, "[What is the baby of {key} called?|What do you call the young of {key}?]", "The young of {key} is called {a_value}."),
    lookup(HOMES, "[Where does {key} live?|What is the home of {key}?]", "{Key} lives in {a_value}."),
    lookup(DEFINITIONS, "[What is {key}?|What is {key}?|What's {key}?|Define {key}.|Explain what {key} is.|What does {key} mean?]", "{Key} is {value}."),
    opposite, listing, neighbour, counting, spelling, first_letter, larger, odd, odd, listing, opposite,
]  # fmt: skip


def any_fact(rng: Random) -> list[Message]:
    fact = pick(rng, FACTS[:1] * 2 + FACTS[7:8] + FACTS)  # capitals and definitions are many
    question, answer = fact(rng)
    return [("user", as_typed(rng, question)), ("assistant", answer)]


def any_sum(rng: Random) -> list[Message]:
    question, answer = one_sum(rng) if chance(rng, 0.85) else word_problem(rng)
    return [("user", question if chance(rng, 0.6) else question.lower()), ("assistant", answer)]
