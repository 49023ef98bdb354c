# ruff: noqa: E501, SIM905 (word lists and templates: a line per thought)
"""Who the stories are about, where they happen and what is in them."""

# Heroes of either sex, then those of one.
ANY_HEROES = """knight dragon fox rabbit robot cat dog mouse owl bear hedgehog squirrel turtle pirate sailor baker
gardener astronaut inventor clockmaker shepherd fisher painter farmer miller teacher doctor child giant ghost elf dwarf
fairy troll unicorn penguin whale dolphin octopus crab frog snail spider bee ant butterfly beetle firefly sparrow crow
raven swan duck goose hen parrot eagle horse pony donkey goat sheep lamb pig cow wolf deer badger otter beaver mole bat
lion tiger elephant giraffe monkey zebra kangaroo panda koala camel hippo crocodile snake lizard dinosaur monster
snowman scarecrow kite teapot train tugboat lantern cloud star detective thief spy explorer librarian postman tailor
shoemaker blacksmith carpenter cook musician fiddler drummer dancer singer juggler clown magician storyteller
beekeeper puppet puppy kitten duckling weaver potter merchant traveller scientist pilot
engineer mechanic firefighter nurse ranger hermit goblin alien moth cricket caterpillar ladybird seal walrus
peacock rooster flamingo hamster parakeet jellyfish seahorse starfish toad""".split()
TWO_WORD_HEROES = ["lighthouse keeper", "polar bear", "guinea pig", "toy maker", "sea captain", "night watchman",
    "little boat", "steam engine", "paper boat", "wooden doll", "stone statue", "weather vane", "snow leopard",
    "space pilot", "market trader"]  # fmt: skip
SHE_HEROES = ["princess", "queen", "girl", "witch", "mermaid", "grandmother", "sorceress", "little sister", "duchess",
    "shepherdess", "woman"]  # fmt: skip
HE_HEROES = [
    "prince",
    "king",
    "boy",
    "wizard",
    "grandfather",
    "old man",
    "little brother",
    "duke",
    "emperor",
    "man",
]
HEROES = [*ANY_HEROES, *TWO_WORD_HEROES, *SHE_HEROES, *HE_HEROES]

SHE_NAMES = """Mira Ada Lena Rosa Nora Ivy Elsa Maya Tilda Clara Juno Hazel Poppy Daisy Luna Stella Freya Greta Ruby
Olive Pearl Flora Nina Sofia Alma Bella Anna Emma Lily Lucy""".split()
HE_NAMES = """Tom Finn Oscar Leo Max Hugo Otto Milo Jasper Felix Theo Ben Sam Noah Emil Anton Bruno Edgar Henry Jonas
Karl Olaf Pip Simon Tobias Frank George Jack Peter Paul""".split()

# What a hero is like, and the sentence that shows it.
TRAITS = {
    "brave": "[Nothing frightened {him} for long|When others ran away, {he} stayed|{He} had never once hidden from a storm].",
    "shy": "{He} [hardly ever spoke to strangers|liked to listen more than {he} liked to talk|blushed whenever somebody said {his} name].",
    "clever": "{He} could [solve any riddle|find a way out of every muddle|think of three answers to any question].",
    "lazy": "{He} liked [sleeping|resting|doing nothing at all] better than anything else.",
    "curious": "{He} wanted to know [what was behind every door|why the wind blew|how everything worked].",
    "tiny": "{He} was so small that {he} could [sleep in a teacup|hide behind a leaf|sit in a shoe].",
    "grumpy": "{He} [grumbled at the rain and grumbled at the sun|frowned from breakfast to bedtime].",
    "kind": "{He} [shared whatever {he} had|could not pass anybody who needed help|had a good word for everyone].",
    "clumsy": "{He} [tripped over {his} own feet twice a day|dropped at least one thing every morning].",
    "lonely": "{He} [had nobody to talk to|ate every meal alone|talked to the moon because nobody else was there].",
    "old": "{He} had [seen a hundred winters|more stories than there are leaves on a tree].",
    "young": "{He} [had never been far from home|was still learning how the world works].",
    "proud": "{He} [never asked anyone for help|was sure that nobody could do anything better].",
    "sleepy": "{He} [yawned all day long|could fall asleep standing up].",
    "hungry": "{He} [was always thinking of the next meal|could smell soup from a mile away].",
    "forgetful": "{He} [forgot where {he} had put almost everything|could not even remember the day of the week].",
    "cheerful": "{He} [hummed a tune wherever {he} went|laughed at least ten times a day].",
    "greedy": "{He} [always wanted one more of everything|counted {his} coins every night].",
    "honest": "{He} had never told a lie, [not even a small one|not even when it was hard].",
    "patient": "{He} could [wait longer than anyone|watch a snail cross the road from one side to the other].",
    "silly": "{He} [wore a hat made of cabbage leaves|walked backwards on Tuesdays].",
    "stubborn": "Once {he} had made up {his} mind, [nothing could change it|not even the wind could turn {him} round].",
    "gentle": "{He} [spoke softly and walked softly|never hurt so much as a fly].",
    "poor": "{He} owned [nothing but a coat and a spoon|little more than the clothes on {his} back].",
    "rich": "{He} had [a room full of gold|everything that money could buy].",
    "lost": "{He} had [taken a wrong turn|lost {his} way] and did not know how to get home.",
    "magical": "When {he} sneezed, [sparks flew|flowers grew where {he} stood].",
    "friendly": "{He} [said good morning to everyone|waved at every boat and every bird].",
    "wise": "People came from far away to [ask {him} for advice|hear what {he} thought].",
    "little": "{He} was the smallest of all, [but {his} heart was large|and nobody took much notice of {him}].",
    "nervous": "{He} [checked every door three times|worried about things that never happened].",
    "blue": "{He} was blue [from head to toe|all over, like the evening sky].",
    "golden": "{He} shone [in the sun like a coin|so brightly that people blinked].",
    "noisy": "You could hear {him} [from the other side of the hill|before you could see {him}].",
    "quiet": "{He} moved [without a sound|as quietly as falling snow].",
}
PLAIN_TRAITS = (
    "tired jolly dreamy strange funny polite bold merry wild playful humble famous invisible flying".split()
)

# Preposition, first mention, later mentions; then what can be seen there.
PLACES = [
    ("in", "a forest", "the forest", "trees"), ("in", "a dark forest", "the forest", "shadows"),
    ("in", "a small village", "the village", "chimneys"), ("in", "a castle", "the castle", "towers"),
    ("in", "an old castle", "the castle", "stone stairs"), ("on", "an island", "the island", "palm trees"),
    ("on", "a mountain", "the mountain", "cliffs"), ("in", "the mountains", "the mountains", "snowy peaks"),
    ("in", "a city", "the city", "rooftops"), ("in", "a big city", "the city", "bright windows"),
    ("by", "the sea", "the sea", "waves"), ("under", "the sea", "the sea", "corals"),
    ("in", "a desert", "the desert", "dunes"), ("in", "a garden", "the garden", "roses"),
    ("on", "a farm", "the farm", "haystacks"), ("in", "a lighthouse", "the lighthouse", "winding stairs"),
    ("in", "a library", "the library", "bookshelves"), ("on", "the moon", "the moon", "silver craters"),
    ("in", "space", "space", "stars"), ("on", "a spaceship", "the spaceship", "blinking lights"),
    ("in", "a cave", "the cave", "glittering crystals"), ("in", "a valley", "the valley", "meadows"),
    ("by", "a river", "the river", "reeds"), ("by", "a lake", "the lake", "water lilies"),
    ("in", "a swamp", "the swamp", "crooked willows"), ("in", "a jungle", "the jungle", "vines"),
    ("in", "a school", "the school", "long corridors"), ("in", "a bakery", "the bakery", "warm ovens"),
    ("in", "a toy shop", "the toy shop", "painted shelves"), ("on", "a ship", "the ship", "white sails"),
    ("in", "a harbour", "the harbour", "fishing boats"), ("in", "a windmill", "the windmill", "turning sails"),
    ("in", "a kingdom", "the kingdom", "banners"), ("in", "a snowy land", "the snowy land", "icicles"),
    ("at", "the North Pole", "the North Pole", "northern lights"), ("in", "a train station", "the station", "platforms"),
    ("in", "a museum", "the museum", "marble statues"), ("in", "a circus", "the circus", "striped tents"),
    ("in", "a meadow", "the meadow", "wild flowers"), ("in", "an orchard", "the orchard", "apple trees"),
    ("in", "a market", "the market", "colourful stalls"), ("in", "a tower", "the tower", "narrow windows"),
    ("on", "a cloud", "the cloud", "soft white hills"), ("on", "a hill", "the hill", "wild daisies"),
    ("on", "a beach", "the beach", "seashells"), ("in", "a theatre", "the theatre", "red curtains"),
    ("in", "a zoo", "the zoo", "tall fences"), ("in", "a park", "the park", "wooden benches"),
    ("in", "an attic", "the attic", "dusty boxes"), ("in", "a kitchen", "the kitchen", "copper pots"),
    ("in", "a haunted house", "the house", "creaking doors"), ("in", "a cottage", "the cottage", "little windows"),
    ("in", "a palace", "the palace", "golden halls"), ("on", "a pirate ship", "the ship", "black sails"),
    ("on", "a distant planet", "the planet", "two red moons"), ("in", "a frozen town", "the town", "frosty lanes"),
    ("in", "a monastery", "the monastery", "quiet courts"), ("in", "a power station", "the power station", "humming pipes"),
    ("by", "a waterfall", "the waterfall", "rainbows"), ("in", "a vineyard", "the vineyard", "green rows"),
]  # fmt: skip
PLACE_STEMS = "land valley town village kingdom island forest city hills".split()

OBJECTS = """silver bell|golden key|old map|red kite|blue umbrella|wooden flute|magic lamp|glass marble|music box|pocket
watch|brass compass|paper boat|woollen scarf|green lantern|crystal ball|silver ring|ruby ring|gold coin|feather pen|leather
book|tin whistle|little drum|toy train|teddy bear|china teapot|copper kettle|straw hat|pair of boots|violin|trumpet|broken
clock|magic wand|flying carpet|treasure chest|diary|letter|seed|lucky stone|seashell|pearl|mirror|candle|crown|sword|shield
|necklace|telescope|paintbrush|hammer|bicycle|sledge|blanket|pumpkin|apple|honey jar|loaf of bread|cake|recipe|spoon|bucket
|ladder|rope|fishing net|white feather|four-leaf clover|snow globe|painted egg|acorn|button|needle|puzzle box|balloon|wooden
horse|magnifying glass|silver spoon|star map""".replace("\n", " ").split("|")  # fmt: skip
OBJECTS = [thing.strip() for thing in OBJECTS]

FRIENDS = """old owl|grey mouse|young fox|tall stranger|quiet fisherman|red squirrel|wise turtle|little girl|small boy|old
sailor|black cat|friendly crow|shy deer|kind baker|tiny beetle|old gardener|white goose|travelling tinker|street
musician|sleepy badger|cheeky sparrow|one-eyed parrot|talking frog|lame donkey|brown bear|night watchman|bold hedgehog|old
woman|snow hare|young shepherd|silver fish|gentle giant|shaggy dog|retired captain|clever raven""".replace(
    "\n", " "
).split("|")
SHE_FRIENDS = {"little girl", "old woman", "white goose"}
HE_FRIENDS = {"small boy", "quiet fisherman", "travelling tinker", "night watchman"}

# Plenty of other things that may be asked for, so that any noun can become a hero.
ODD_HEROES = """toaster umbrella pebble sock chair pencil spoon cactus potato carrot mushroom pumpkin balloon clock mirror
bicycle tractor submarine rocket satellite telescope piano trumpet violin feather snowflake raindrop river mountain oak
acorn apple cookie pancake sandwich noodle pickle button zipper shoelace hat glove lamp candle broom bucket kettle fork
plate pillow blanket computer printer phone camera library bridge lighthouse windmill comet planet shadow echo rainbow
volcano vampire werewolf zombie mummy skeleton viking samurai ninja cowboy gladiator pharaoh philosopher poet lawyer
judge banker plumber electrician barber butcher florist jeweller locksmith hunter soldier guard captain admiral general
mayor president ballerina acrobat wrestler boxer runner swimmer skier surfer gorilla chimpanzee leopard cheetah jaguar
panther hyena buffalo bison moose reindeer llama alpaca rhino ostrich emu pelican seagull puffin stork heron falcon hawk
vulture woodpecker nightingale robin canary chicken turkey salmon shark tuna eel squid shrimp lobster clam worm slug
centipede scorpion mosquito dragonfly grasshopper mantis termite wasp gecko iguana chameleon tortoise raccoon skunk
opossum sloth armadillo ferret weasel mongoose lemur yak ox mule colt calf chick""".split()

SYLLABLES = "ba bel bri cor da dor el fen gal gri ha il jo ka lim lor ma mor na nim ol pel qui ra ro sel ta thi ul va wen xi yo zan zor".split()


def invented_stem(number: int) -> str:
    """A made-up word for the number: the same number, the same word."""
    first, rest = number % len(SYLLABLES), number // len(SYLLABLES)
    second, third = rest % len(SYLLABLES), rest // len(SYLLABLES) % (2 * len(SYLLABLES))
    return SYLLABLES[first] + SYLLABLES[second] + (SYLLABLES[third] if third < len(SYLLABLES) else "")
