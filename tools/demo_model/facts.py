"""Writes simple facts: capitals, animals, colours, opposites, days and sums of small numbers."""

from dataclasses import dataclass
from random import Random

from tools.demo_model.samples import Sample
from tools.demo_model.words import (
    ANIMALS,
    CAPITALS,
    COLOUR_OF,
    CONTINENT_OF,
    DAYS,
    MIXED_COLOURS,
    MONTHS,
    NUMBERS,
    OPPOSITES,
    with_article,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact in its wordings: `stem` + `answer` is the statement, `question` asks for `answer`.

    `record` holds the fact as keys and values. `reply_stem` begins the reply in a chat, in the words of the
    question; where it is empty that is `stem`.
    """

    stem: str
    answer: str
    question: str
    record: dict[str, str | int]
    reply_stem: str = ""

    @property
    def statement(self) -> str:
        return _capitalized(f"{self.stem} {self.answer}.")

    @property
    def reply(self) -> str:
        return _capitalized(f"{self.reply_stem or self.stem} {self.answer}.")


def draw_fact(random: Random) -> Fact:
    """Draw a fact of any kind."""
    kinds = (
        _capital,
        _capital,
        _animal,
        _animal,
        _colour,
        _opposite,
        _calendar,
        _sum,
        _sum,
        _difference,
        _product,
    )
    return random.choice(kinds)(random)


def draw_statement(random: Random) -> Sample:
    """Draw a fact as a plain sentence; the prompt stops before the answer."""
    fact = draw_fact(random)
    stem = fact.stem[0].upper() + fact.stem[1:]
    return Sample(prompt=stem, completion=f" {fact.answer}.")


def draw_question(random: Random) -> Sample:
    """Draw a fact as question and answer, after up to two others of the same form."""
    shown = [draw_fact(random) for _ in range(random.choice((0, 0, 0, 0, 0, 0, 1, 1, 2)))]
    fact = draw_fact(random)
    before = "".join(f"Question: {other.question}\nAnswer: {_capitalized(other.answer)}\n\n" for other in shown)
    return Sample(prompt=f"{before}Question: {fact.question}\nAnswer:", completion=f" {_capitalized(fact.answer)}")


def draw_paragraph(random: Random) -> Sample:
    """Draw a few facts in a row; the prompt is the first of them."""
    first, *rest = (draw_fact(random).statement for _ in range(random.randint(2, 5)))
    return Sample(prompt=first, completion="".join(" " + statement for statement in rest))


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _capital(random: Random) -> Fact:
    country = random.choice(tuple(CAPITALS))
    capital, continent = CAPITALS[country], CONTINENT_OF[country]
    return random.choice(
        (
            Fact(
                stem=f"the capital of {country} is",
                answer=capital,
                question=f"What is the capital of {country}?",
                record={"country": country, "capital": capital},
            ),
            Fact(
                stem=f"{capital} is the capital of",
                answer=country,
                question=f"Which country has the capital {capital}?",
                record={"capital": capital, "country": country},
            ),
            Fact(
                stem=f"{country} is a country in",
                answer=continent,
                question=f"Where is {country}?",
                record={"country": country, "continent": continent},
            ),
        )
    )


def _animal(random: Random) -> Fact:
    animal = random.choice(ANIMALS)
    a_animal = with_article(animal.name)
    key, stem, answer, question = random.choice(
        (
            ("sound", f"{a_animal} says", animal.sound, f"What does {a_animal} say?"),
            ("sound", f"the sound of {a_animal} is", animal.sound, f"What is the sound of {a_animal}?"),
            ("food", f"{a_animal} likes to eat", animal.food, f"What does {a_animal} eat?"),
            ("home", f"{a_animal} lives in", with_article(animal.home), f"Where does {a_animal} live?"),
            (
                "young",
                f"a young {animal.name} is called",
                with_article(animal.young),
                f"What is a young {animal.name}?",
            ),
        )
    )
    value = answer.split(" ", 1)[1] if key in ("home", "young") else answer
    return Fact(stem=stem, answer=answer, question=question, record={"animal": animal.name, key: value})


def _colour(random: Random) -> Fact:
    if random.random() < 0.5:
        (first, second), mixed = random.choice(tuple(MIXED_COLOURS.items()))
        if random.random() < 0.5:
            first, second = second, first
        return Fact(
            stem=f"{first} and {second} make",
            answer=mixed,
            question=f"What colour do {first} and {second} make?",
            record={"first": first, "second": second, "colour": mixed},
        )
    thing, colour = random.choice(tuple(COLOUR_OF.items()))
    stems = f"{thing} is", f"the colour of {thing} is"
    stem = random.choice(stems[::-1])
    questions = f"What colour is {thing}?", f"What is the colour of {thing}?"
    question = random.choice(questions)
    return Fact(
        stem=stem,
        answer=colour,
        question=question,
        record={"thing": thing, "colour": colour},
        reply_stem=stems[questions.index(question)],
    )


def _opposite(random: Random) -> Fact:
    pair = random.choice(tuple(OPPOSITES.items()))
    word, opposite = pair if random.random() < 0.5 else pair[::-1]
    return Fact(
        stem=f"the opposite of {word} is",
        answer=opposite,
        question=f"What is the opposite of {word}?",
        record={"word": word, "opposite": opposite},
    )


def _calendar(random: Random) -> Fact:
    kind, names = random.choice((("day", DAYS), ("month", MONTHS)))
    place = random.randrange(len(names))
    relation, step = random.choice((("after", 1), ("before", -1)))
    answer = names[(place + step) % len(names)]
    return Fact(
        stem=f"the {kind} {relation} {names[place]} is",
        answer=answer,
        question=f"Which {kind} comes {relation} {names[place]}?",
        record={relation: names[place], kind: answer},
    )


def _arithmetic(random: Random, first: int, second: int, *, sign: str, word: str, result: int) -> Fact:
    stems = f"{first} {sign} {second} =", f"{first} {word} {second} is"
    stem = random.choice(stems)
    if max(first, second, result) < len(NUMBERS) and random.random() < 0.25:
        named = [NUMBERS[number] for number in (first, second, result)]
        return Fact(
            stem=f"{named[0]} {word} {named[1]} is",
            answer=named[2],
            question=f"How much is {named[0]} {word} {named[1]}?",
            record={"first": first, "second": second, "result": result},
        )
    questions = f"What is {first} {sign} {second}?", f"How much is {first} {word} {second}?"
    question = random.choice(questions)
    return Fact(
        stem=stem,
        answer=str(result),
        question=question,
        record={"first": first, "second": second, "result": result},
        reply_stem=stems[questions.index(question)],
    )


def _sum(random: Random) -> Fact:
    first, second = random.randint(0, 12), random.randint(0, 12)
    return _arithmetic(random, first, second, sign="+", word="plus", result=first + second)


def _difference(random: Random) -> Fact:
    second, result = random.randint(0, 10), random.randint(0, 10)
    return _arithmetic(random, second + result, second, sign="-", word="minus", result=result)


def _product(random: Random) -> Fact:
    first, second = random.randint(0, 10), random.randint(0, 10)
    return _arithmetic(random, first, second, sign="*", word="times", result=first * second)
