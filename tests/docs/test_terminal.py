"""The terminal that pictures are taken of shows what a person would see."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from rich.console import Console
from rich.progress import Progress

from tests.docs.recording import MAX_BYTES, PICTURE
from tests.docs.terminal import Frame, Screen, picture

SVG = "{http://www.w3.org/2000/svg}"


def shown(screen: Screen) -> list[str]:
    return ["".join(character for character, _ in line).rstrip() for line in screen.lines]


def test_lines_wrap_and_are_written_over() -> None:
    screen = Screen(columns=4)
    screen.write("abcdef\r\nxy\rz\r\n\x1b[?25lone\r\n\x1b[1A\x1b[2Ktwo")
    assert shown(screen) == ["abcd", "ef", "zy", "two", ""]


def test_a_bar_that_moves_is_there_once_and_full_at_the_end() -> None:
    screen = Screen(columns=60)
    console = Console(force_terminal=True, width=60, color_system="standard")
    with console.capture() as written, Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("demo", total=3)
        for _ in range(3):
            progress.advance(task)
            progress.refresh()
    screen.write(written.get().replace("\n", "\r\n"))
    (line,) = (each for each in shown(screen) if each)
    assert line.startswith("demo ")
    assert "100%" in line


def test_each_state_is_in_the_picture_in_its_turn_and_what_stays_is_written_once() -> None:
    screen, frames = Screen(columns=20), []
    for text in ("<same>\r\n", "\x1b[31mfirst\x1b[0m", "\r\x1b[2Ksecond"):
        screen.write(text)
        frames.append(Frame(lines=screen.lines, seconds=1.0))
    drawn = picture(frames, columns=20, title="three")
    tree = ElementTree.fromstring(drawn)
    spans = list(tree.iter(f"{SVG}tspan"))
    assert [each.text for each in spans] == ["<same>", "first", "second"]
    assert [each.get("fill") is not None for each in spans] == [False, True, False]
    assert "0%{visibility:hidden}33.333%{visibility:visible}66.667%{visibility:hidden}" in drawn
    assert "prefers-reduced-motion" in drawn


def test_the_recording_is_small_asks_nobody_and_runs_no_script() -> None:
    content = PICTURE.read_text(encoding="utf-8")
    assert len(content.encode()) <= MAX_BYTES
    names = {each.tag.removeprefix(SVG) for each in ElementTree.fromstring(content).iter()}
    assert names == {"svg", "title", "style", "rect", "g", "text", "tspan"}
    assert content.count("http") == content.count("http://127.0.0.1") + 1, "its namespace alone"
