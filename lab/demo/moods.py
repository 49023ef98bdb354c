# ruff: noqa: E501 (templates: a line per thought)
"""How a story begins, feels and ends."""

OPENINGS = [
    "[Once upon a time|Long ago|Many years ago|Once], {in_place}, there [lived|was] {a_hero} called {name}.",
    "{In_place} [lived|there once lived] {a_hero} [called|named|whose name was] {name}.",
    "There was once {a_hero} [called|named] {name}, who lived {in_place}.",
    "This is the story of {name}, {a_hero} who lived {in_place}.",
    "[Not so long ago|A long time ago], there was {a_hero} {in_place}. {His} name was {name}.",
    "{Name} was {a_hero}, and {he} lived {in_place}.",
    "[When the world was young|In the days when wishes still helped], {a_hero} called {name} lived {in_place}.",
]
CARRIED = [
    "{He} [never went anywhere without|always carried] {a_object}.",
    "The thing {he} loved best was {a_object}.",
    "In {his} pocket {he} kept {a_object}.",
]
EPISODES = [
    "On the way {he} came to a [wide|fast] river without a bridge. A [ferryman|beaver] offered to take {him} across for a song. "
    "{Name} sang the only song {he} knew, [and the ferry swayed in time|out of tune but with all {his} heart], and soon they were on the other side.",
    "At [sunset|nightfall] {he} rested under [a crooked tree|a wide bridge]. [The stars came out one by one|An owl called twice], and {name} [thought of home|wondered what the next day would bring].",
    "Then the path split in three. One way smelled of [smoke|salt], one was [dark|full of thorns], and one was [pretty but far too easy|wide and sunny]. {Name} [closed {his} eyes and listened|threw a pebble], and took the [second|third].",
    "An old milestone asked {him} a riddle: \"What has teeth but cannot bite?\" {Name} thought for a long time. \"A comb!\" {he} said at last, and the milestone [laughed|told {him} a short cut].",
    "It began to [rain|snow], and {name} [crept into an empty barn|sheltered under a rock]. There {he} shared {his} last [biscuit|crust] with [a shy mouse|a wet sparrow], who promised to remember it.",
    "{He} came to a market where everybody was shouting at once. Somebody wanted to sell {him} [a hat for a cat|a jar of moonlight|yesterday's weather]. \"[Not today|Maybe tomorrow],\" said {name} politely, and walked on.",
]  # fmt: skip
EPILOGUES = [
    "The next [morning|day], {name} and {fname} [had breakfast together|walked once around {the_place}]. They talked about everything that had happened, and {fname} laughed until {fhe} hiccuped.",
    "After that, {name} often [visited {fname}|sat with {fname} in the evening]. They planned their next adventure, and they drew a map for it [on an old tablecloth|in the dust].",
    "A [week|month] later a letter arrived for {name}. It said: \"Come quickly, we need your help!\" So {he} called {fn}, and the two of them set off again. But that is another story.",
    "Then {name} fell asleep, for it had been a long day. {He} dreamt of [the {sights}|a warm light], and in the dream {fname} was there too.",
    "In time, {name} told the story to [all the children|everyone who would listen] {in_the_place}. Each time it became a little longer, and nobody minded.",
    "{Fname} decided to stay. {Fhe} moved in next door, and from then on there were always two cups on {the_table}.",
    "Later {name} planted a little tree on the spot where it had happened. It grew tall, and every year {he} and {fname} met in its shade.",
    "News of it spread beyond {the_place}. A [singer|painter] came to see {name} and made a [song|picture] of it, which is still known there today.",
    "Then they celebrated. There was [cake|soup] and music, and {fname} danced, although {fhe} had said {fhe} could not.",
]  # fmt: skip
NO_MORE = [
    "That is where the story ends. [They lived happily, and so should you|The rest is up to you].",
    "Nothing more happened, and that was just how {name} liked it.",
    "And then it was time for bed. Good night!",
]

# What one may call the mood, a sentence of air, and how it ends.
MOODS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "happy": (
        ["happy", "cheerful", "joyful", "heart-warming", "nice"],
        ["The sun shone on the {sights}, and [the birds sang|the air smelled of bread].",
         "It was a [bright|cheerful] place, and {name} was glad to live there.",
         "Every morning began with [a song|a laugh]."],
        ["From that day on, the {hero} and {fname} were [the best of friends|hardly ever apart], and {in_the_place} there was always [laughter|music].",
         "{Name} danced all the way home, and the {hero} and {fname} lived happily ever after {in_the_place}.",
         "That evening there was a great feast {in_the_place}, and the {hero} laughed more than anyone."]),
    "sad": (
        ["sad", "bittersweet", "melancholy", "touching", "tearful"],
        ["A grey mist lay over the {sights}, and [it rained almost every day|few people ever came].",
         "Sometimes {name} looked out at the {sights} and sighed without knowing why.",
         "It was a quiet place, and {name} felt it most in the evening."],
        ["But when autumn came, {fname} had to go far away. {Name} waved until there was nothing left to see, and the {hero} cried a little {in_the_place}.",
         "They never met again. But whenever it rained on {the_place}, the {hero} thought of {fname}, and a tear ran down {his} face.",
         "Soon afterwards they had to say goodbye. {Name} kept a small place free at {the_table}, and there the old {hero} sits {in_the_place} and waits to this day."]),
    "funny": (
        ["funny", "silly", "amusing", "crazy", "hilarious"],
        ["{He} had a hat that was [much too big|made of cheese], and {he} wore it even in the bath.",
         "Every Tuesday {he} [put {his} socks on {his} ears|had an argument with a spoon], and the spoon usually won.",
         "The {sights} giggled whenever {he} walked by, or so {he} claimed."],
        ["{Name} bowed so deeply that {he} fell over, and everyone {in_the_place} laughed, the {hero} loudest of all.",
         "And if you ever meet {a_hero} {in_the_place} with [a cabbage|a teapot] on {his} head, say hello: it is {name}.",
         "They celebrated {in_the_place} with forty-two pancakes. The {hero} ate forty-one, and {fname} had to roll {him} home."]),
    "scary": (
        ["scary", "spooky", "creepy", "frightening", "dark"],
        ["At night [strange shadows|pale lights] moved between the {sights}, and nobody dared to ask what they were.",
         "After dark [doors creaked|something scratched at the windows], although there was no wind.",
         "People whispered that {the_place} was never quite empty."],
        ["Everything was quiet again {in_the_place}. But sometimes, at midnight, the {hero} hears three slow knocks, and nobody is at the door.",
         "{Name} locked the door that night, and so did {fname}. And far away, behind {the_place}, something laughed softly at the {hero}.",
         "The {hero} slept with a candle from then on. Only the cold footprints {in_the_place} were never explained."]),
    "calm": (
        ["calm", "cosy", "peaceful", "gentle", "relaxing", "sweet", "bedtime"],
        ["The evenings there were long and golden, and [a soft wind stroked the {sights}|the {sights} rustled quietly].",
         "Time passed slowly, and nobody was ever in a hurry.",
         "When it grew dark, little lights came on one after another."],
        ["The {hero} pulled up the blanket, listened to the night {in_the_place}, and fell asleep with a smile. Good night, {nm}.",
         "Then the moon rose over {the_place}. {Name} and {fname} drank a cup of warm milk, and soon the {hero} was fast asleep.",
         "The {sights} whispered good night, the lights went out {in_the_place}, and the {hero} dreamt of tomorrow."]),
    "exciting": (
        ["exciting", "thrilling", "adventurous", "action-packed", "dramatic"],
        ["No two days were the same, and danger was never far away.",
         "{Name} could feel it: today [something was going to happen|everything would change].",
         "A drum was beating somewhere behind the {sights}."],
        ["{Name} stood on the highest spot of {the_place} and looked into the distance. The next adventure was already waiting for the {hero}.",
         "Everyone {in_the_place} shouted {his} name, and the {hero} raised {his} arms to the sky.",
         "\"What now?\" asked {fname}. \"Now,\" said {nm} the {hero}, \"we go beyond {the_place}.\" And off they went."]),
    "magical": (
        ["magical", "mysterious", "enchanted", "dreamy", "strange"],
        ["On some nights the {sights} glowed, and those who listened could hear them sing.",
         "It was a place where [clocks ran backwards at full moon|the wind knew everybody's name].",
         "A little magic hung in the air, like the smell of rain."],
        ["And whenever the moon is full, a silver light dances {in_the_place}. Then you know that the {hero} and {fname} are out walking.",
         "A shower of sparks fell on {the_place}, and the {hero} knew that the magic would stay.",
         "{Name} smiled, and the {sights} of {the_place} glowed once more. Nobody but the {hero} ever knew why."]),
}  # fmt: skip
