"""The process that renders is used again as long as it renders in time, and is made anew where it was lost."""

from __future__ import annotations

import json

import pytest

from serve_app.core.prompt import Conversation
from serve_app.templates.chat_template import Renderer
from serve_app.templates.rendering import Refused, TemplateLimits, Work

ENDLESS_ONCE_ASKED = (
    "{% if messages[0].content == 5 %}{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def conversation(content: object) -> Conversation:
    return Conversation(source=json.dumps({"messages": [{"role": "user", "content": content}]}))


@pytest.fixture
def renderer():
    limits = TemplateLimits(max_cpu_s=0.2, max_wall_s=20, slow_after_s=10)
    renderer = Renderer(Work(template=ENDLESS_ONCE_ASKED, limits=limits))
    yield renderer
    renderer.close()


def test_a_child_that_rendered_in_time_renders_again(renderer: Renderer) -> None:
    for number in (1, 2, 3):
        assert renderer.render(conversation(number)).text == str(number)
        assert renderer.num_idle == 1


def test_a_child_that_was_ended_is_not_used_again_and_the_next_one_renders(renderer: Renderer) -> None:
    renderer.render(conversation(1))
    with pytest.raises(Refused, match="too much time"):
        renderer.render(conversation(5))
    assert renderer.num_idle == 0
    assert renderer.render(conversation(2)).text == "2"


def test_a_slow_child_runs_at_lower_priority_and_is_not_used_again() -> None:
    renderer = Renderer(Work(template="{{ messages[0].content }}", limits=TemplateLimits(slow_after_s=0)))
    for number in (1, 2):
        assert renderer.render(conversation(number)).text == str(number)
        assert renderer.num_idle <= 1
    renderer.close()


def test_what_was_closed_begins_again_where_it_is_asked(renderer: Renderer) -> None:
    renderer.render(conversation(1))
    renderer.close()
    assert renderer.num_idle == 0
    assert renderer.render(conversation(2)).text == "2"


def test_idle_children_that_died_are_passed_over(renderer: Renderer) -> None:
    renderer.render(conversation(1))
    renderer._idle[0].connection.close()
    assert renderer.render(conversation(2)).text == "2"


def test_a_refusal_leaves_the_child_to_the_next(renderer: Renderer) -> None:
    broken = Conversation(source=json.dumps({"messages": [1]}))
    with pytest.raises(Refused, match="fails with AttributeError"):
        renderer.render(broken)
    assert renderer.num_idle == 1
    assert renderer.render(conversation(2)).text == "2"
