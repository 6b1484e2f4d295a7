"""Writes little Python functions from a table of operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random

from tools.demo_model.samples import Sample, Split, split_of
from tools.demo_model.words import NUMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A function in templates: `{p}` and `{q}` are parameters, `{n}` and `{word}` a number and its name."""

    name: str
    parameters: tuple[str, ...]
    doc: str
    body: str
    returns: str


def _operation(name: str, parameters: str, doc: str, body: str, returns: str) -> Operation:
    return Operation(name=name, parameters=tuple(parameters.split()), doc=doc, body=body, returns=returns)


OPERATIONS = (
    _operation("add_{word}", "number", "Add {n} to a number.", "return {p} + {n}", "int"),
    _operation("subtract_{word}", "number", "Subtract {n} from a number.", "return {p} - {n}", "int"),
    _operation("multiply_by_{word}", "number", "Multiply a number by {n}.", "return {p} * {n}", "int"),
    _operation("divide_by_{word}", "number", "Divide a number by {n}.", "return {p} / {n}", "float"),
    _operation("power_of_{word}", "number", "Raise a number to the power of {n}.", "return {p} ** {n}",
               "int"),
    _operation("is_more_than_{word}", "number", "Say whether a number is more than {n}.", "return {p} > {n}",
               "bool"),
    _operation("is_less_than_{word}", "number", "Say whether a number is less than {n}.", "return {p} < {n}",
               "bool"),
    _operation("is_multiple_of_{word}", "number", "Say whether a number is a multiple of {n}.",
               "return {p} % {n} == 0", "bool"),
    _operation("first_{word}", "list", "Return the first {n} items.", "return {p}[:{n}]", "list"),
    _operation("last_{word}", "list", "Return the last {n} items.", "return {p}[-{n}:]", "list"),
    _operation("repeat_{word}_times", "text", "Repeat a text {n} times.", "return {p} * {n}", "str"),
    _operation("count_to_{word}", "", "Print the numbers up to {n}.",
               "for number in range(1, {n} + 1):\n    print(number)", "None"),
    _operation("add", "number number", "Add two numbers.", "return {p} + {q}", "int"),
    _operation("subtract", "number number", "Subtract one number from another.", "return {p} - {q}", "int"),
    _operation("multiply", "number number", "Multiply two numbers.", "return {p} * {q}", "int"),
    _operation("larger", "number number", "Return the larger of two numbers.",
               "if {p} > {q}:\n    return {p}\nreturn {q}", "int"),
    _operation("smaller", "number number", "Return the smaller of two numbers.",
               "if {p} < {q}:\n    return {p}\nreturn {q}", "int"),
    _operation("is_even", "number", "Say whether a number is even.", "return {p} % 2 == 0", "bool"),
    _operation("is_odd", "number", "Say whether a number is odd.", "return {p} % 2 == 1", "bool"),
    _operation("square", "number", "Return the square of a number.", "return {p} * {p}", "int"),
    _operation("total", "list", "Return the sum of a list of numbers.",
               "result = 0\nfor item in {p}:\n    result += item\nreturn result", "int"),
    _operation("average", "list", "Return the average of a list of numbers.", "return sum({p}) / len({p})",
               "float"),
    _operation("largest", "list", "Return the largest number of a list.", "return max({p})", "int"),
    _operation("count_items", "list", "Count the items of a list.", "return len({p})", "int"),
    _operation("reverse", "list", "Return a list in reverse order.", "return {p}[::-1]", "list"),
    _operation("keep_positive", "list", "Keep the numbers above zero.",
               "return [item for item in {p} if item > 0]", "list"),
    _operation("double_all", "list", "Double every number of a list.", "return [item * 2 for item in {p}]",
               "list"),
    _operation("sort_items", "list", "Return the items in order.", "return sorted({p})", "list"),
    _operation("shout", "text", "Return a text in capital letters.", "return {p}.upper()", "str"),
    _operation("count_letters", "text", "Count the letters of a text.", "return len({p})", "int"),
    _operation("split_words", "text", "Split a text into words.", "return {p}.split()", "list"),
    _operation("greet", "text", "Greet someone by name.", 'return "Hello, " + {p} + "!"', "str"),
    _operation("join", "text text", "Join two texts with a space.", 'return {p} + " " + {q}', "str"),
)  # fmt: skip
PARAMETERS = {
    "number": ("number", "value", "x", "amount", "n", "count"),
    "list": ("items", "values", "numbers", "data", "things"),
    "text": ("text", "word", "name", "line", "message"),
}
NUM_FORMS = 4
ANNOTATIONS = {"number": "int", "list": "list", "text": "str"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFunction:
    """A function in its parts; `signature` ends before the line break, `body` is indented."""

    signature: str
    doc: str
    body: str


def write_function(random: Random) -> WrittenFunction:
    """Choose an operation, its number and its parameter names, and write the function's parts."""
    operation = random.choice(OPERATIONS)
    number = random.randint(2, len(NUMBERS) - 1)
    names: list[str] = []
    for kind in operation.parameters:
        names.append(random.choice([name for name in PARAMETERS[kind] if name not in names]))
    return _written(operation, number, names, is_annotated=random.random() < 0.4)


@cache
def every_function_text() -> frozenset[str]:
    """Each text that `draw_function` can draw; some thousands."""
    return frozenset(
        form.text
        for operation in OPERATIONS
        for number in range(2, len(NUMBERS))
        for names in product(*(PARAMETERS[kind] for kind in operation.parameters))
        if len(set(names)) == len(names)
        for is_annotated in (True, False)
        for form in _forms(_written(operation, number, names, is_annotated=is_annotated))
    )


def _written(operation: Operation, number: int, names: Sequence[str], *, is_annotated: bool) -> WrittenFunction:
    first, second = ([*names, "", ""])[:2]
    shown = [f"{name}: {ANNOTATIONS[kind]}" if is_annotated else name
             for name, kind in zip(names, operation.parameters, strict=True)]  # fmt: skip
    arrow = f" -> {operation.returns}" if is_annotated else ""
    name = operation.name.format(word=NUMBERS[number])
    body = operation.body.format(p=first, q=second, n=number).replace("\n", "\n    ")
    return WrittenFunction(
        signature=f"def {name}({', '.join(shown)}){arrow}:",
        doc=operation.doc.format(n=number),
        body=f"    {body}\n",
    )


def draw_function(random: Random) -> Sample:
    """Draw one function; the prompt is its signature, at times with the docstring."""
    return random.choice(_forms(write_function(random)))


def draw_function_text(random: Random, *, split: Split) -> str:
    """Draw a function's text that is of a split in every form in which the text can be drawn.

    One that is held out so was never read in whole, whatever a prompt of it is.
    """
    place = random.randrange(NUM_FORMS)
    while True:
        forms = _forms(write_function(random))
        text = forms[place].text
        if {split_of(form.prompt) for form in forms if form.text == text} == {split}:
            return text


def _forms(function: WrittenFunction) -> tuple[Sample, ...]:
    docstring = f'\n    """{function.doc}"""'
    return (
        Sample(prompt=function.signature, completion=f"\n{function.body}"),
        Sample(prompt=function.signature, completion=f"{docstring}\n{function.body}"),
        Sample(prompt=function.signature + docstring, completion=f"\n{function.body}"),
        Sample(prompt=f"# {function.doc}\n{function.signature}", completion=f"\n{function.body}"),
    )


def draw_module(random: Random) -> Sample:
    """Draw a file of several functions; the prompt is the first signature."""
    functions = [draw_function(random) for _ in range(random.randint(2, 5))]
    first, rest = functions[0], [function.text for function in functions[1:]]
    return Sample(prompt=first.prompt, completion="\n\n".join([first.completion, *rest]))
