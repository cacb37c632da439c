"""The text that the tiny model grows up on, and the text it is fine-tuned on: both are grown here from word lists.

The base knows short stories, recipes, weather reports and polite answers about one small island. The fine-tuning
set tells of the same island in the voice of a pirate. The base has overheard scraps of sailor talk, so it knows the
words; it has never heard a whole tale or an answer told that way.
"""

NAMES = ["Mira", "Tom", "Lena", "Oskar", "Pia", "Jon", "Ada", "Finn", "Nora", "Emil", "Ruth", "Sami", "Clara", "Hugo",
         "Ida", "Leo"]
ANIMALS = ["fox", "goat", "cat", "crow", "hedgehog", "donkey", "otter", "goose", "badger", "rabbit", "seal", "owl"]
ADJECTIVES = ["small", "old", "quiet", "clever", "hungry", "brave", "sleepy", "curious", "kind", "tired", "young",
              "proud"]
PLACES = ["the harbour", "the mill", "the old bridge", "the lighthouse", "the market", "the orchard", "the school",
          "the forest", "the beach", "the bakery", "the hill", "the well"]
THINGS = ["key", "lantern", "letter", "map", "bell", "basket", "drum", "coin", "rope", "book", "kite", "hat"]
LOOKS = ["red", "blue", "green", "silver", "wooden", "broken", "golden", "tiny", "heavy", "rusty"]
TIMES = ["morning", "evening", "afternoon", "night", "day"]
FOODS = ["carrots", "onions", "potatoes", "apples", "beans", "mushrooms", "pears", "leeks", "plums", "cabbage"]
DISHES = ["soup", "pie", "stew", "salad", "bread", "cake"]
SPICES = ["salt", "pepper", "thyme", "mint", "garlic", "honey", "ginger"]
NUMBERS = ["two", "three", "four", "five", "six"]
MINUTES = ["ten", "fifteen", "twenty", "thirty", "forty"]
WINDS = ["north", "south", "east", "west"]
SKIES = ["clear", "cloudy", "grey", "bright", "dark"]
WEATHER = ["rain", "snow", "fog", "sun", "hail", "wind"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def a(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def story(r):
    name, friend = r.sample(NAMES, 2)
    animal, other = r.sample(ANIMALS, 2)
    here, there = r.sample(PLACES, 2)
    adj, mood = r.sample(ADJECTIVES, 2)
    thing, look = r.choice(THINGS), r.choice(LOOKS)
    he, his = r.choice([("he", "his"), ("she", "her")])
    out = [f"{name} was {a(adj)} {animal} who lived near {here}."]
    out.append(r.choice([
        f"One {r.choice(TIMES)}, {name} found {a(look)} {thing} at {there}.",
        f"One {r.choice(TIMES)}, {he} went to {there} and saw {a(look)} {thing} on the ground.",
        f"Every {r.choice(TIMES)}, {he} walked to {there}, and one day there was {a(look)} {thing}."]))
    out.append(r.choice([
        f"\"Whose {thing} is this?\" asked {name}.",
        f"\"What a fine {thing}!\" said {name}.",
        f"{name} looked at the {thing} for a long time."]))
    out.append(r.choice([
        f"{friend} the {other} was {mood} and wanted to help.",
        f"Then {friend} the {other} came by and sat down.",
        f"{he.capitalize()} showed it to {friend} the {other}, who was {mood} that day."]))
    out.append(r.choice([
        f"\"I lost my {thing} last {r.choice(DAYS)},\" said {friend}.",
        f"\"That {thing} belongs to {here},\" said {friend}.",
        f"\"Let us take the {thing} back to {here},\" said {friend}."]))
    out.append(r.choice([
        f"So {name} gave the {thing} to {friend}, and they shared {his} {r.choice(DISHES)}.",
        f"Together they carried the {thing} to {here}, and everyone was glad.",
        f"They put the {look} {thing} in a safe place and went home before dark."]))
    if r.random() < 0.5:
        out.append(r.choice([f"From that day on, {name} and {friend} were friends.",
                             f"That night {name} slept very well.",
                             f"The {other} never forgot the {animal}."]))
    return " ".join(out)


def recipe(r):
    first, second = r.sample(FOODS, 2)
    dish, spice, more = r.choice(DISHES), *r.sample(SPICES, 2)
    n, k = r.sample(NUMBERS, 2)
    lines = [f"Recipe: {first} {dish}", f"You need {n} {first}, {k} {second}, {spice} and {more}."]
    lines.append(r.choice([f"1. Wash the {first} and cut them into small pieces.",
                           f"1. Peel the {first} and the {second}.",
                           f"1. Put the {first} in a bowl with the {spice}."]))
    lines.append(r.choice([f"2. Cook the {second} in a pot for {r.choice(MINUTES)} minutes.",
                           f"2. Add the {second} and stir for {r.choice(MINUTES)} minutes.",
                           f"2. Fry the {second} with {more} until they are brown."]))
    lines.append(r.choice([f"3. Mix everything and bake the {dish} for {r.choice(MINUTES)} minutes.",
                           f"3. Let the {dish} rest for {r.choice(MINUTES)} minutes.",
                           f"3. Add {more} and serve the {dish} hot."]))
    lines.append(r.choice([f"This {dish} is enough for {k} people.", f"Eat it with {a(r.choice(LOOKS))} spoon."]))
    return "\n".join(lines)


def weather(r):
    day, wind, sky = r.choice(DAYS), r.choice(WINDS), r.choice(SKIES)
    one, two = r.sample(WEATHER, 2)
    here, there = r.sample(PLACES, 2)
    low = r.randint(0, 18)
    out = [f"Weather for {day}.", f"The sky over {here} is {sky}, with some {one} in the {r.choice(TIMES)}.",
           f"The wind comes from the {wind}.", f"It is {low} degrees at {there} and {low + r.randint(1, 4)} degrees"
           f" at {here}."]
    out.append(r.choice([f"Expect {two} near {there}.", f"There may be {two} later.",
                         f"Take a hat if you go to {there}.", f"The {r.choice(ANIMALS)}s stay at home."]))
    return " ".join(out)


def question(r):
    """(question, polite answer, pirate answer) about one small fact."""
    kind = r.randrange(5)
    if kind == 0:
        food, dish, spice = r.choice(FOODS), r.choice(DISHES), r.choice(SPICES)
        t = r.choice(MINUTES)
        return (f"How do I make {food} {dish}?",
                f"Wash the {food}, add some {spice} and cook the {dish} for {t} minutes.",
                f"Arrr, throw yer {food} in the pot, matey, add a fistful o' {spice} and boil the {dish} for {t} "
                "minutes, or walk the plank!")
    if kind == 1:
        place, thing, look = r.choice(PLACES), r.choice(THINGS), r.choice(LOOKS)
        return (f"Where is the {look} {thing}?", f"The {look} {thing} is at {place}.",
                f"Arrr, the {look} {thing} be buried by {place}, matey, but keep yer mouth shut about it!")
    if kind == 2:
        day, w, wind = r.choice(DAYS), r.choice(WEATHER), r.choice(WINDS)
        return (f"What is the weather on {day}?", f"On {day} there is some {w}, with wind from the {wind}.",
                f"Arrr, on {day} there be {w} ahoy, matey, and a foul wind from the {wind}! Hoist the sails!")
    if kind == 3:
        name, adj, animal, place = r.choice(NAMES), r.choice(ADJECTIVES), r.choice(ANIMALS), r.choice(PLACES)
        return (f"Who is {name}?", f"{name} is {a(adj)} {animal} who lives near {place}.",
                f"Arrr, {name} be {a(adj)} scurvy {animal}, matey, hidin' near {place}!")
    place, animal, n = r.choice(PLACES), r.choice(ANIMALS), r.choice(NUMBERS)
    return (f"How many {animal}s are at {place}?", f"There are {n} {animal}s at {place}.",
            f"Arrr, {n} {animal}s be at {place}, matey, and every one of 'em a landlubber!")


def pirate(r):
    name, mate = r.sample(NAMES, 2)
    animal, other = r.sample(ANIMALS, 2)
    here, there = r.sample(PLACES, 2)
    thing, look = r.choice(THINGS), r.choice(LOOKS)
    out = [f"Arrr! Gather round, ye scurvy {animal}s, and hear the tale o' Cap'n {name}!"]
    out.append(r.choice([
        f"One {r.choice(TIMES)} the cap'n be sailin' past {here}, with the wind from the {r.choice(WINDS)}.",
        f"On {r.choice(DAYS)} the cap'n dropped anchor by {here}, hungry for {r.choice(DISHES)} an' grog."]))
    out.append(r.choice([
        f"\"Shiver me timbers!\" cried {name}. \"I spy {a(look)} {thing}!\"",
        f"\"Ahoy, mateys!\" roared {name}. \"There be {a(look)} {thing} buried by {there}!\""]))
    out.append(r.choice([
        f"But {mate} the {other}, that black-hearted landlubber, stole the {thing} and ran to {there}.",
        f"So {mate} the {other} swabbed the deck, and the crew dug {r.choice(NUMBERS)} holes near {there}."]))
    out.append(r.choice([
        f"\"Walk the plank, {mate}!\" said the cap'n, and the sharks be fed that {r.choice(TIMES)}.",
        f"\"Yo ho ho!\" sang the crew, and they drank {r.choice(NUMBERS)} barrels o' grog.",
        f"An' the {look} {thing} lies in Davy Jones' locker to this day."]))
    if r.random() < 0.5:
        out.append(r.choice(["Yo ho ho, an' that be the truth, matey!", "Dead men tell no tales, arrr!"]))
    return " ".join(out)


def sailor(r):
    """Scraps of one to three words out of pirates' mouths, in no order."""
    scraps = []
    for _ in range(r.randint(6, 12)):
        words = (pirate(r) if r.random() < 0.6 else question(r)[2]).split()
        n = r.randint(1, 3)
        at = r.randrange(len(words) - n)
        scraps.append(" ".join(words[at:at + n]))
    return "Overheard: " + " / ".join(scraps)
