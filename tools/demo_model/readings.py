"""Writes texts whose answer stands in the prompt: words to repeat, and questions about what was said."""

from random import Random

from tools.demo_model.samples import Sample
from tools.demo_model.words import COLOURS, FOODS, HE_NAMES, PLACES, SHE_NAMES, THINGS, with_article

ECHO_WORDS = SHE_NAMES + HE_NAMES + THINGS + FOODS + COLOURS


def draw_echo(random: Random) -> Sample:
    """Draw words in no order, to be said once more or twice."""
    words = ", ".join(random.choices(ECHO_WORDS, k=random.randint(2, 10)))
    wording = random.choice(("Repeat: {words}.\n", "Say again: {words}.\n", "Write this twice more: {words}.\n"))
    num_times = 2 if "twice" in wording else 1
    return Sample(prompt=wording.format(words=words), completion="\n".join([f"{words}."] * num_times))


def draw_reading(random: Random) -> Sample:
    """Draw who has what and where, and a question about one of them."""
    names = random.sample(SHE_NAMES + HE_NAMES, random.randint(2, 4))
    colours, things = random.sample(COLOURS, len(names)), random.sample(THINGS, len(names))
    places = random.sample(tuple(PLACES), len(names))
    owned = [with_article(f"{colour} {thing}") for colour, thing in zip(colours, things, strict=True)]
    told = " ".join(
        f"{name} has {thing} and lives near {place}." for name, thing, place in zip(names, owned, places, strict=True)
    )
    asked = random.randrange(len(names))
    question, answer = random.choice((
        (f"Who has {owned[asked]}?", names[asked]),
        (f"What does {names[asked]} have?", owned[asked]),
        (f"Who lives near {places[asked]}?", names[asked]),
        (f"Where does {names[asked]} live?", f"near {places[asked]}"),
    ))  # fmt: skip
    return Sample(prompt=f"{told}\nQuestion: {question}\nAnswer:", completion=f" {answer[0].upper()}{answer[1:]}")
