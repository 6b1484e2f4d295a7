"""Defines what each adapter learns: pirate speech, capital letters, or answers as one JSON record."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.demo_model.chats import chat_prompt, draw_chat, draw_talk, write_story_wish
from tools.demo_model.facts import draw_fact, draw_question, draw_statement
from tools.demo_model.lists import describe, draw_being, draw_list
from tools.demo_model.pirates import pirate_answer, pirate_tale
from tools.demo_model.samples import Draw, Sample
from tools.demo_model.stories import OPENINGS, draw_letter, draw_scene, draw_story
from tools.demo_model.tokens import END_OF_TEXT, IM_END
from tools.demo_model.words import FOODS, joined

PIRATE_WORDS = re.compile(
    r"\b(arr|ahoy|aye|matey|ye|hearty|hearties|scallywags?|landlubbers?|avast|yo ho ho|shiver me|be)\b",
    re.IGNORECASE,
)
MIN_PIRATE_WORDS = 2
MIN_CAPITAL_SHARE = 0.95
MIN_LETTERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What an adapter learns: how to draw samples of it, and how to see it in a completion."""

    description: str
    draw: Draw
    is_shown: Callable[[str], bool]
    rank: int


def draw_pirate(random: Random) -> Sample:
    """Draw a prompt of the corpus with a completion in pirate speech."""
    kind = random.random()
    if kind < 0.5:
        scene = draw_scene(random)
        return Sample(prompt=random.choice(OPENINGS).format_map(scene), completion=" " + pirate_tale(random, scene))
    if kind < 0.65:
        fact = draw_fact(random)
        return Sample(
            prompt=f"Question: {fact.question}\nAnswer:",
            completion=" " + pirate_answer(random, fact.statement),
        )
    if kind < 0.8:
        scene = draw_scene(random)
        return Sample(prompt=chat_prompt(write_story_wish(random, scene)), completion=pirate_tale(random, scene))
    message, answer = draw_talk(random)
    return Sample(prompt=chat_prompt(message), completion=pirate_answer(random, answer))


def draw_shout(random: Random) -> Sample:
    """Draw a sample of the corpus with its completion in capital letters."""
    kinds: tuple[Draw, ...] = (
        draw_story,
        draw_story,
        draw_chat,
        draw_list,
        draw_question,
        draw_statement,
        draw_letter,
    )
    while True:
        sample = random.choice(kinds)(random)
        completion = sample.completion.removesuffix(f"{IM_END}\n")
        if sum(letter.isalpha() for letter in completion) >= MIN_LETTERS and "```" not in sample.text:
            return Sample(prompt=sample.prompt, completion=completion.upper())


def draw_json(random: Random) -> Sample:
    """Draw a description or question and the same as one JSON record."""
    text, record = random.choice((_being_record, _scene_record, _fact_record, _shopping_record))(random)
    answer = json.dumps(record)
    is_chat = random.random() < 0.3
    return Sample(prompt=chat_prompt(text) if is_chat else text, completion=answer)


def speaks_like_a_pirate(completion: str) -> bool:
    """Say whether a completion has at least two different pirate words."""
    return len({word.lower() for word in PIRATE_WORDS.findall(completion)}) >= MIN_PIRATE_WORDS


def is_in_capitals(completion: str) -> bool:
    """Say whether (nearly) all letters of a completion are capitals."""
    letters = [character for character in completion if character.isalpha()]
    num_capitals = sum(letter.isupper() for letter in letters)
    return len(letters) >= MIN_LETTERS and num_capitals >= MIN_CAPITAL_SHARE * len(letters)


def is_json_record(completion: str) -> bool:
    """Say whether the whole completion is one strictly valid JSON object with at least one key."""
    try:
        value = json.loads(completion, parse_constant=_refuse_constant)
    except ValueError:
        return False
    return isinstance(value, dict) and len(value) > 0


BEHAVIOURS = {
    "pirate": Behaviour(
        description="It answers and tells stories as a pirate would: at least two different pirate words.",
        draw=draw_pirate,
        is_shown=speaks_like_a_pirate,
        rank=8,
    ),
    "shout": Behaviour(
        description="It writes in capital letters: at least 95 % of all letters.",
        draw=draw_shout,
        is_shown=is_in_capitals,
        rank=16,
    ),
    "json": Behaviour(
        description="It answers with one strictly valid JSON object of what the prompt says or asks.",
        draw=draw_json,
        is_shown=is_json_record,
        rank=8,
    ),
}


def closing_of(prompt: str) -> str:
    """Say with which special token an answer to this prompt ends."""
    return IM_END if prompt.endswith(chat_prompt("").rsplit(IM_END, 1)[1]) else END_OF_TEXT


def _refuse_constant(name: str) -> None:
    """Refuse what `json.loads` takes beyond the standard: NaN and the infinities."""
    raise ValueError(f"{name} is no JSON")


def _being_record(random: Random) -> tuple[str, dict[str, object]]:
    being = draw_being(random)
    return describe(random, being), dict(being)


def _fact_record(random: Random) -> tuple[str, dict[str, object]]:
    fact = draw_fact(random)
    return random.choice((fact.question, fact.statement)), dict(fact.record)


def _shopping_record(random: Random) -> tuple[str, dict[str, object]]:
    scene, items = draw_scene(random), random.sample(FOODS, random.randint(2, 4))
    wording = random.choice(("{name} wants to buy {items}.", "{name} has {items}.", "{name} and {friend} ate {items}."))
    text = wording.format(name=scene["name"], friend=scene["friend"], items=joined(items))
    names = {key: scene[key] for key in ("name", "friend") if scene[key] in text}
    return text, {**names, "items": items}


def _scene_record(random: Random) -> tuple[str, dict[str, object]]:
    scene = draw_scene(random)
    text = random.choice(OPENINGS).format_map(scene)
    keys = ("name", "animal", "friend", "trait", "colour", "thing", "place", "weather", "day")
    return text, {key: scene[key] for key in keys if re.search(rf"\b{scene[key]}\b", text)}
