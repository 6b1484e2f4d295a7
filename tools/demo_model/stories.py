"""Writes small stories, letters and weather reports from templates."""

from random import Random

from tools.demo_model.samples import Sample
from tools.demo_model.words import (
    ANIMALS,
    CAFES,
    COLOURS,
    DAYS,
    FOODS,
    HE_NAMES,
    PLACES,
    PREPOSITIONS,
    SHE_NAMES,
    SIGNS,
    THINGS,
    TRAITS,
    WEATHER,
    with_article,
)

Scene = dict[str, str]

OPENINGS = (
    "Once upon a time, there was {a_trait} {animal} named {name}.",
    "Once upon a time, {a_trait} {animal} named {name} lived near {place}.",
    "Long ago, {a_trait} {animal} called {name} came to {place}.",
    "{In_place} there lived {a_trait} {animal} named {name}.",
    "{name} was {a_trait} {animal} who lived near {place}.",
    "{name} the {animal} had {a_colour} {thing}.",
    "{name} the {animal} woke up early on {day}.",
    "One {weather} morning, {name} the {animal} went to {place}.",
    "One day, {name} and {friend} walked to {place}.",
    "It was a {weather} day, and {name} wanted to play {in_place}.",
    "{name} the {animal} could not find the {colour} {thing}.",
    "Every {day}, {name} the {animal} went to {place} with {friend}.",
    "There was once {a_trait} {animal} {in_place}. {Their} name was {name}.",
    "{name} and {friend} were good friends.",
)
WISHES = (
    "{They} wanted {a_thing} more than anything.",
    "{They} liked to eat {food} and to look at the {detail}.",
    "{They} was {trait}, but {they} was also very hungry.",
    "{They} had never seen {place} before.",
    "All day long {they} dreamed of {food} and {other_food}.",
    "{They} wanted to find a friend to play with.",
    "{They} had a secret: {they} was afraid of the dark.",
    "{Their} best friend was a {friend_animal} named {friend}.",
    "{They} carried {a_thing} in a small bag.",
    "{They} loved the {detail} and the {other_detail} there.",
)
EVENTS = (
    "{They} walked past the {detail} and sang a song.",
    "Behind the {detail}, {they} found {a_colour} {thing}.",
    "There {they} met a {friend_animal} named {friend}.",
    "Suddenly the wind took {their} {thing} away.",
    "{They} sat down near the {detail} and ate some {food}.",
    "Then it began to rain, and {they} ran under a tree.",
    "{They} looked for the {thing} everywhere, but {they} could not find it.",
    "A {friend_animal} named {friend} came and asked for help.",
    "{They} heard a loud noise behind the {detail}.",
    "{They} traded some {food} for {a_colour} {thing}.",
    "{They} fell into the mud and laughed.",
    "{They} climbed up high to see the {detail}.",
    "{They} lost {their} way near the {other_detail}.",
    "In the afternoon {they} helped {friend} to carry the {food}.",
    "{They} gave the {thing} to {friend} and smiled.",
    "Soon {they} was tired and slept for an hour.",
    "The {friend_animal} showed {them} the {detail}.",
    "{They} counted the {detail} and got to {count}.",
)
TALK = (
    '"Where is my {thing}?" asked {name}.',
    '"Look at the {detail}!" said {friend}.',
    '"Can I come with you?" asked {friend}. "Yes, of course," said {name}.',
    '"I have some {food} for you," said {name}.',
    '"What a {trait} {friend_animal} you are!" said {name}.',
    '"Do not be afraid," said {friend}. "I will help you."',
    '"This {thing} is too big for me," said {name}.',
    '"Let us share the {food}," said {friend}, and so they did.',
    '"I know a way through {place}," said {friend}.',
    '"Thank you," said {name}. "You are very kind."',
    '"Is this your {thing}?" asked {friend}. "Yes, it is," said {name}.',
    '"Tomorrow we can bake bread with {food}," said {friend}.',
)
ENDINGS = (
    "In the evening {name} went home and was happy.",
    "{name} and {friend} were friends from that day on.",
    "Then they shared the {food}, and everyone was happy.",
    "At last {name} found the {thing} and laughed.",
    "{name} never forgot that day {in_place}.",
    "So {name} learned that it is good to be {trait}.",
    "They danced until the stars came out.",
    "That night {name} slept well and dreamed of {food}.",
    "And the {colour} {thing} is still there today.",
    "{name} told everyone about the {detail}.",
    "They went home together, tired and glad.",
    "The next {day} they came back to {place} again.",
)
CLOSINGS = ("", "", " The end.")
LETTERS = (
    "Thank you for the {colour} {thing}. I use it every {day}.",
    "How are you? I am well, but it is {weather} here.",
    "Last {day} I went to {place}. I saw the {detail} and ate some {food}.",
    "Please bring {food} and {other_food} when you visit me.",
    "My {animal} is {trait} today. It wants more {food}.",
    "Do you still have my {thing}? I need it on {day}.",
    "I will come to {place} on {day}. Wait for me near the {detail}.",
    "I have a new {friend_animal}. It is small and {trait}.",
)
GREETINGS = ("Your friend,", "See you soon,", "With love,", "Yours,", "Best wishes,")


def draw_scene(random: Random) -> Scene:
    """Draw the people, place and things of one story, as values for the templates."""
    hero_is_she, friend_is_she = random.random() < 0.5, random.random() < 0.5
    name = random.choice(SHE_NAMES if hero_is_she else HE_NAMES)
    friend = random.choice([other for other in (SHE_NAMES if friend_is_she else HE_NAMES) if other != name])
    animal, friend_animal = random.sample(ANIMALS, 2)
    place = random.choice(tuple(PLACES))
    detail, other_detail = random.sample(PLACES[place], 2)
    food, other_food = random.sample(FOODS, 2)
    trait, colour, thing = random.choice(TRAITS), random.choice(COLOURS), random.choice(THINGS)
    in_place = f"{PREPOSITIONS.get(place, 'in')} {place}"
    they, them, their = ("she", "her", "her") if hero_is_she else ("he", "him", "his")
    return {
        "name": name, "friend": friend, "animal": animal.name, "friend_animal": friend_animal.name,
        "place": place, "detail": detail, "other_detail": other_detail, "food": food,
        "other_food": other_food,
        "in_place": in_place, "In_place": in_place.capitalize(), "trait": trait,
        "a_trait": with_article(trait), "colour": colour, "a_colour": with_article(colour),
        "thing": thing, "a_thing": with_article(thing), "weather": random.choice(WEATHER),
        "day": random.choice(DAYS), "count": str(random.randint(3, 30)),
        "they": they, "them": them, "their": their, "They": they.capitalize(), "Their": their.capitalize(),
    }  # fmt: skip


def draw_story(random: Random) -> Sample:
    """Draw a story; the prompt is its opening."""
    scene = draw_scene(random)
    return Sample(prompt=random.choice(OPENINGS).format_map(scene), completion=" " + story_body(random, scene))


def story_body(random: Random, scene: Scene) -> str:
    """Write what follows the opening of a story: wishes, events, talk and an ending."""
    middle = random.sample(EVENTS, random.randint(1, 3)) + random.sample(TALK, random.randint(0, 2))
    random.shuffle(middle)
    sentences = [*random.sample(WISHES, random.randint(0, 2)), *middle, random.choice(ENDINGS)]
    return " ".join(sentences).format_map(scene) + random.choice(CLOSINGS)


def draw_tale(random: Random) -> Sample:
    """Draw a story of many chapters about the same hero: a text of about 500 to 2000 tokens."""
    scene = draw_scene(random)
    chapters = []
    for number in range(1, random.randint(7, 22)):
        chapter_scene = draw_scene(random) | {
            key: scene[key] for key in ("name", "animal", "they", "them", "their", "They", "Their", "trait", "a_trait")
        }
        opening = random.choice(OPENINGS[6:12]).format_map(chapter_scene)
        chapters.append(f"Chapter {number}\n{opening} {story_body(random, chapter_scene)}")
    title = f"The long tale of {scene['name']} the {scene['trait']} {scene['animal']}\n\n"
    return Sample(prompt=title, completion="\n\n".join(chapters))


def draw_letter(random: Random) -> Sample:
    """Draw a short letter; the prompt is its address and first line."""
    scene = draw_scene(random)
    first, *rest = (line.format_map(scene) for line in random.sample(LETTERS, random.randint(2, 4)))
    closing = f"\n{random.choice(GREETINGS)}\n{scene['name']}"
    return Sample(prompt=f"Dear {scene['friend']},\n{first}", completion="".join(" " + line for line in rest) + closing)


def draw_note(random: Random) -> Sample:
    """Draw a line with a sign or accents, whose characters take several bytes each."""
    scene, (mood, sign) = draw_scene(random), random.choice(tuple(SIGNS.items()))
    cafe = random.choice(CAFES)
    return random.choice(
        (
            Sample(prompt=f"{scene['day']} {scene['in_place']}: {mood}", completion=f" {sign}"),
            Sample(prompt=f"{scene['name']} the {scene['animal']} is {mood}", completion=f" {sign}{sign}{sign}"),
            Sample(
                prompt=f"On {scene['day']} {scene['name']} and {scene['friend']} met at",
                completion=f" {cafe}. {scene['They']} ordered {scene['food']} and {scene['other_food']}.",
            ),
        )
    )
