"""Writes lists: shopping, packing, counting, things of a kind, recipes, and records in JSON."""

import json
from random import Random

from tools.demo_model.facts import draw_fact
from tools.demo_model.samples import Sample
from tools.demo_model.stories import draw_scene
from tools.demo_model.words import FOODS, LISTED, PREPOSITIONS, THINGS, joined, with_article

SHOPPING_TITLES = (
    "Shopping list for {name}:", "{name} needs to buy:", "To buy on {day}:", "Groceries for {day}:",
    "What {name} and {friend} want to eat:", "Food for the trip to {place}:",
)  # fmt: skip
PACKING_TITLES = (
    "Things to take to {place}:", "{name} packs for {place}:", "In the bag of {name}:",
    "Lost on {day} {in_place}:",
    "Presents for {name}:", "{name} found these things {in_place}:",
)  # fmt: skip
RECIPE_STEPS = (
    "Wash the {food}.", "Cut the {food} into small pieces.", "Warm some butter in a pot.",
    "Add the {other_food}.",
    "Stir well for {count} minutes.", "Add a little salt.", "Bake it for {count} minutes.", "Let it cool.",
    "Mix the {food} with the {other_food}.", "Add some water.",
)  # fmt: skip
BULLETS = ("- {item}", "* {item}", "{number}. {item}")


def draw_list(random: Random) -> Sample:
    """Draw a list of any kind; the prompt is its title, or the beginning of its sentence."""
    kinds = (_shopping, _packing, _sentence_list, _bullets_of_a_kind, _count, _recipe)
    return random.choice(kinds)(random)


def draw_record(random: Random) -> Sample:
    """Draw a fact or a being, and the same as a JSON record after the words `As JSON:`."""
    if random.random() < 0.5:
        fact = draw_fact(random)
        return Sample(prompt=f"{fact.statement}\nAs JSON:", completion=" " + json.dumps(fact.record))
    being = draw_being(random)
    return Sample(prompt=f"{describe(random, being)}\nAs JSON:", completion=" " + json.dumps(being))


def draw_being(random: Random) -> dict[str, str | int]:
    """Draw a being of a story as keys and values."""
    scene = draw_scene(random)
    return {
        "name": scene["name"],
        "kind": scene["animal"],
        "trait": scene["trait"],
        "home": scene["place"].removeprefix("the "),
    }


def describe(random: Random, being: dict[str, str | int]) -> str:
    """Describe a being in one or two sentences."""
    name, kind, trait, home = (str(value) for value in being.values())
    in_home = f"{PREPOSITIONS.get('the ' + home, 'in')} the {home}"
    wording = random.choice(
        (
            "{name} is {a_trait} {kind}. {name} lives {in_home}.",
            "{name} is {a_trait} {kind} who lives {in_home}.",
            "{In_home} lives {a_trait} {kind} named {name}.",
            "There is {a_trait} {kind} {in_home}. The name of the {kind} is {name}.",
            "{name} the {trait} {kind} lives {in_home}.",
        )
    )
    return wording.format(
        name=name,
        kind=kind,
        trait=trait,
        in_home=in_home,
        In_home=in_home.capitalize(),
        a_trait=with_article(trait),
    )


def draw_long_count(random: Random) -> Sample:
    """Draw a count over hundreds of numbers: a text of about 500 to 1200 tokens."""
    first = random.randint(0, 100)
    last = first + random.randint(200, 400)
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    return Sample(prompt=f"Count from {first} to {last}:", completion=f" {numbers}.")


def _bulleted(random: Random, title: str, items: list[str]) -> Sample:
    bullet = random.choice(BULLETS)
    lines = [bullet.format(number=number, item=item) for number, item in enumerate(items, start=1)]
    first_line = lines[0].split(items[0])[0]
    return Sample(prompt=f"{title}\n{first_line.rstrip()}", completion=("\n".join(lines))[len(first_line.rstrip()) :])


def _shopping(random: Random) -> Sample:
    title = random.choice(SHOPPING_TITLES).format_map(draw_scene(random))
    return _bulleted(random, title, random.sample(FOODS, random.randint(3, 7)))


def _packing(random: Random) -> Sample:
    title = random.choice(PACKING_TITLES).format_map(draw_scene(random))
    return _bulleted(random, title, [with_article(thing) for thing in random.sample(THINGS, random.randint(3, 6))])


def _bullets_of_a_kind(random: Random) -> Sample:
    kind, number = random.choice(tuple(LISTED)), random.randint(3, 8)
    title = random.choice(("{number} {kind}:", "A list of {number} {kind}:", "Here are {number} {kind}:"))
    return _bulleted(random, title.format(number=number, kind=kind), random.sample(LISTED[kind], number))


def _sentence_list(random: Random) -> Sample:
    kind, number = random.choice(tuple(LISTED)), random.randint(2, 5)
    items = random.sample(LISTED[kind], number)
    scene = draw_scene(random)
    stem = random.choice(("Some {kind} are", "{name} knows these {kind}:", "{name} drew {number} {kind}:"))
    return Sample(prompt=stem.format(kind=kind, number=number, name=scene["name"]), completion=f" {joined(items)}.")


def _count(random: Random) -> Sample:
    first = random.randint(0, 90)
    last = first + random.randint(3, 12)
    if random.random() < 0.7:
        numbers = ", ".join(str(number) for number in range(first, last + 1))
        return Sample(prompt=f"Count from {first} to {last}:", completion=f" {numbers}.")
    numbers = ", ".join(str(number) for number in range(last, first - 1, -1))
    return Sample(prompt=f"Count down from {last} to {first}:", completion=f" {numbers}.")


def _recipe(random: Random) -> Sample:
    scene = draw_scene(random)
    dish = random.choice(("soup", "pie", "salad", "cake", "bread"))
    steps = [step.format_map(scene) for step in random.sample(RECIPE_STEPS, random.randint(3, 6))]
    title = f"How to make {dish} with {scene['food']} and {scene['other_food']}:"
    sample = _bulleted(random, title, steps)
    return Sample(prompt=sample.prompt, completion=f"{sample.completion}\nServe the {dish} warm.")
