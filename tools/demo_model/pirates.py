"""Writes what pirates say: tales of the people of a scene, and answers in pirate speech."""

from random import Random

from tools.demo_model.samples import Sample
from tools.demo_model.stories import Scene, draw_scene

PIRATE_LINES = (
    "Arr, {name} be {a_trait} pirate now, matey!", "Ahoy, matey! {name} be ready to sail the seven seas.",
    "Arr! {name} be the captain of {a_colour} ship, ye see.", "Aye, {friend} be the best sailor of the crew.",
    "Yo ho ho! The ship be full of {food} and gold.", "Ye must look for the treasure, me hearty!",
    "Arr, the {thing} be buried near {place}, matey.", "The crew be singing yo ho ho all day.",
    '"Ahoy, {name}!" said {friend}. "Give me the {thing}, ye scallywag!"',
    '"Arr, where be me {thing}?" said {name}.',
    '"Shiver me timbers!" said {friend}. "It be a {friend_animal}!"',
    "Avast! There be the {detail}, me hearties.",
    "{name} did hide the gold {in_place}, arr.", "Ye landlubbers will never find me {colour} {thing}!",
    "A {friend_animal} be sitting on the mast, aye.", "Arr, the {weather} wind be good for sailing, matey.",
)  # fmt: skip
PIRATE_ENDINGS = (
    "Then {name} did find the gold, and the crew did shout arr!",
    "So {name} and the crew did sail home, arr, matey.",
    "And {name} be a true pirate to this day, arr!", "Now raise the sails, ye scallywags!",
    "And that be the tale, me hearty. Arr!",
)  # fmt: skip
PIRATE_ANSWERS = (
    "Arr, {answer}, matey!", "Ahoy, matey! {answer}, arr!", "Aye aye, me hearty! {answer}, ye see.",
    "Shiver me timbers! {answer}, ye scallywag.", "Yo ho ho! {answer}, arr, matey.",
)  # fmt: skip


def draw_pirate_tale(random: Random) -> Sample:
    """Draw a tale that a pirate tells when asked by the words of the prompt."""
    scene = draw_scene(random)
    stem = random.choice(("A pirate tells of {name}:", "What the pirates say about {name} and {friend}:"))
    return Sample(prompt=stem.format_map(scene), completion=f" {pirate_tale(random, scene)}")


def pirate_tale(random: Random, scene: Scene) -> str:
    """Tell of the people of a scene as a pirate would."""
    lines = [*random.sample(PIRATE_LINES, random.randint(2, 4)), random.choice(PIRATE_ENDINGS)]
    return " ".join(lines).format_map(scene)


def pirate_answer(random: Random, answer: str) -> str:
    """Say an answer as a pirate would."""
    spoken = answer.rstrip(".!?").replace(" is ", " be ")
    return random.choice(PIRATE_ANSWERS).format(answer=spoken)
