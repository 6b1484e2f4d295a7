"""Writes chats in the markup of the chat template: greetings, questions, stories, lists and code."""

from collections.abc import Callable
from random import Random

from tools.demo_model.facts import draw_fact
from tools.demo_model.functions import write_function
from tools.demo_model.samples import Sample
from tools.demo_model.stories import OPENINGS, Scene, draw_scene, story_body
from tools.demo_model.tokens import IM_END, IM_START
from tools.demo_model.words import LISTED, joined

# what the user says, and how the assistant may answer
GREETINGS = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Good morning", "Good day!"),
     ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Ask me something.",
      "Hi! I am glad to see you.")),
    (("Who are you?", "What are you?", "What is your name?"),
     ("I am a small demo model.", "I am the demo model. I know a few simple facts and many small stories.")),
    (("How are you?", "How are you today?"),
     ("I am well, thank you. And you?", "I am fine, thank you.", "Very well! How can I help you?")),
    (("Thank you", "Thank you!", "Thanks"), 
     ("You are welcome.", "You are welcome! Do you have another question?")),
    (("Goodbye", "Bye!", "Good night"), ("Goodbye! Come back soon.", "Bye! It was nice to talk to you.")),
)  # fmt: skip
SYSTEMS = (
    "You are a kind assistant.", "You are a helpful assistant.", "Answer in short sentences.", "Be brief.",
    "You talk with children.", "You are the voice of a small demo.",
)  # fmt: skip
STORY_WISHES = (
    "Tell me a story about {name} the {animal}.",
    "Please tell a story about {a_trait} {animal} named {name}.",
    "Write a short story about {name} and {friend}.", "Can you tell me a story about {name} {in_place}?",
    "Tell me about {name}, {a_trait} {animal}.",
)  # fmt: skip

Turn = tuple[str, str]


def draw_chat(random: Random) -> Sample:
    """Draw a chat of one to three turns; the prompt ends where the last answer begins."""
    return chat_of([draw_turn(random) for _ in range(random.choice((1, 1, 1, 2, 3)))], random)


def draw_fact_chat(random: Random) -> Sample:
    """Draw a chat of one question about a fact."""
    return chat_of([_fact(random)], random)


def draw_long_chat(random: Random) -> Sample:
    """Draw a chat of many turns: a text of about 500 to 1500 tokens."""
    return chat_of([draw_turn(random) for _ in range(random.randint(12, 24))], random)


def chat_of(turns: list[Turn], random: Random) -> Sample:
    """Write turns as marked-up text whose last answer is the completion."""
    *earlier, (question, answer) = turns
    system = f"{IM_START}system\n{random.choice(SYSTEMS)}{IM_END}\n" if random.random() < 0.2 else ""
    before = "".join(f"{chat_prompt(asked)}{answered}{IM_END}\n" for asked, answered in earlier)
    return Sample(prompt=system + before + chat_prompt(question), completion=f"{answer}{IM_END}\n")


def chat_prompt(question: str) -> str:
    """Write a user's message and the header of the assistant's answer."""
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"


def draw_turn(random: Random) -> Turn:
    """Draw a message of the user and the answer to it."""
    kinds: tuple[Callable[[Random], Turn], ...] = (draw_talk, draw_talk, draw_talk, _story, _story, _function)
    return random.choice(kinds)(random)


def draw_talk(random: Random) -> Turn:
    """Draw a short turn: a greeting, a fact or a list."""
    kinds: tuple[Callable[[Random], Turn], ...] = (_greeting, _fact, _fact, _fact, _list)
    return random.choice(kinds)(random)


def write_story_wish(random: Random, scene: Scene) -> str:
    """Write a user's wish for a story with the people of a scene."""
    return random.choice(STORY_WISHES).format_map(scene)


def _greeting(random: Random) -> Turn:
    messages, answers = random.choice(GREETINGS)
    return random.choice(messages), random.choice(answers)


def _fact(random: Random) -> Turn:
    fact = draw_fact(random)
    return fact.question, fact.reply


def _story(random: Random) -> Turn:
    scene = draw_scene(random)
    opening = random.choice(OPENINGS).format_map(scene)
    return write_story_wish(random, scene), f"{opening} {story_body(random, scene)}"


def _list(random: Random) -> Turn:
    kind, number = random.choice(tuple(LISTED)), random.randint(2, 5)
    items = random.sample(LISTED[kind], number)
    wish = random.choice(("Name {number} {kind}.", "Give me {number} {kind}.", "List {number} {kind}, please."))
    answer = "\n".join(f"- {item}" for item in items) if wish.startswith("List") else joined(items).capitalize() + "."
    return wish.format(number=number, kind=kind), answer


def _function(random: Random) -> Turn:
    function = write_function(random)
    wish = random.choice(("Write a function: {doc}", "Write Python. {doc}", "How do I do this in Python? {doc}"))
    return wish.format(doc=function.doc), f"```python\n{function.signature}\n{function.body}```"
