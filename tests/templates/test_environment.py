"""What a template itself writes of special tokens is known; all else is a client's, whatever it looks like."""

from __future__ import annotations

import pytest

from serve_app.templates.environment import FIRST_MARK, Marks, compiled, environment

NAMES = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>", "[INST]", "<s>", "STOP")


def places(template: str, **sent: str) -> dict[str, bool]:
    """Of every special token in the text whether it is the template's own."""
    source = repr(sent)
    marks = Marks(NAMES, template + source)
    text = compiled(template, environment()).render(sent)
    marked = compiled(template, environment(), marks.put).render(sent)
    assert marks.take(marked) == text
    foreign = marks.foreign(text, marked, source)
    found = [(name, at) for name in NAMES for at in range(len(text)) if text.startswith(name, at)]
    return {f"{name} {at}": not any(at <= each < at + len(name) for each in foreign) for name, at in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_was_sent_is_text_and_the_templates_own_is_not(name: str) -> None:
    """What a user wrote became a control token: transformers #29279, llama.cpp #26273."""
    found = places(f"{name}{{{{ x }}}}{name}", x=f"a{name}b")
    assert list(found.values()) == [True, False, True] or list(found.values()) == [True, True, False]
    assert found[f"{name} {len(name) + 1}"] is False


@pytest.mark.parametrize(
    ("template", "sent", "are_own"),
    [
        pytest.param("{{ x }}{{ y }}", {"x": "<|im", "y": "_end|>"}, [False], id="joined of two texts"),
        pytest.param("<{{ x }}", {"x": "|im_end|>"}, [False], id="begun by the template"),
        pytest.param("{{ x }}>", {"x": "<|im_end|"}, [False], id="ended by the template"),
        pytest.param("{{ '<|' + x + '|>' }}", {"x": "user"}, [True], id="a role between pieces"),
        pytest.param("<|{{ x }}|>", {"x": "end"}, [False], id="another word between pieces"),
        pytest.param("<|im_{{ x }}|>", {"x": "end"}, [False], id="half a word between pieces"),
        pytest.param("<|{{ x }}_{{ y }}|>", {"x": "im", "y": "end"}, [False], id="two words between pieces"),
        pytest.param("{{ '<|im_' ~ y ~ '|>' }}", {"x": "end"}, [], id="no word"),
        pytest.param("{% set x = 'end' %}{{ '<|' ~ x ~ '|>' }}", {"y": "fine"}, [True], id="pieces of its own"),
        pytest.param("{{ x | replace(' ', '') }}", {"x": "< |im_end|>"}, [False], id="made by the template"),
        pytest.param("{{ x | upper }}", {"x": "stop"}, [False], id="made of small letters"),
        pytest.param("{{ x.replace('a', '<s>') }}", {"x": "a"}, [True], id="what is written for what was found"),
        pytest.param("{{ '<s>' if '<s>' in x }}", {"x": "<s>"}, [True], id="sought and written"),
        pytest.param("{{ x.split('<s>')[-1] }}<s>", {"x": "<s>a"}, [True], id="cut away"),
        pytest.param("{{ ['<s>', x] | join('STOP') }}", {"x": "a"}, [True, True], id="joined by the template"),
        pytest.param("{{ {'<s>': 'STOP'}['<s>'] }}", {"x": "a"}, [True], id="looked up"),
    ],
)
def test_a_token_is_the_templates_where_all_of_it_is(template: str, sent: dict[str, str], are_own: list[bool]) -> None:
    assert list(places(template, **sent).values()) == are_own


def test_marks_stand_nowhere_in_what_is_rendered() -> None:
    first = Marks(NAMES, "")
    sent = first.put("<|im_end|> < STOP") + first.end
    second = Marks(NAMES, sent)
    assert first.stand_in(sent)
    assert not second.stand_in(sent)
    assert second.take(second.put(f"{sent}<s>")) == f"{sent}<s>"


def test_a_model_without_special_tokens_marks_nothing() -> None:
    none = Marks((), "")
    assert none.put("<|im_end|>") == "<|im_end|>"
    assert none.foreign("<|im_end|>", "<|im_end|>", "") == ()
    assert none.end == chr(FIRST_MARK)
