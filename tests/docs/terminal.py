"""A terminal that keeps what a program writes to it, and a picture of that which moves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from rich.ansi import SGR_STYLE_MAP
from rich.style import Style
from rich.terminal_theme import NIGHT_OWLISH, TerminalTheme

THEME: TerminalTheme = NIGHT_OWLISH
GROUND, INK, FAINT = "#0d1117", "#d6deeb", "#8b98a8"
SIZE, ADVANCE, LEADING, MARGIN = 14, 8.4, 19, 14
CONTROL = re.compile(r"\x1b\[(?P<what>[?\d;]*)(?P<act>[A-Za-z])|\x1b\][^\x07]*\x07|[\r\n]")
Cell = tuple[str, Style]
Line = tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the screen shows for so many seconds."""

    lines: tuple[Line, ...]
    seconds: float


@dataclass(slots=True, kw_only=True)
class Screen:
    """As much of a terminal as rich asks for: lines that wrap, colours, going up, and wiping a line out."""

    columns: int
    rows: list[list[Cell]] = field(default_factory=lambda: [[]])
    at: tuple[int, int] = (0, 0)
    style: Style = field(default_factory=Style.null)

    def write(self, text: str) -> None:
        """What a program wrote."""
        done = 0
        for found in CONTROL.finditer(text):
            self._put(text[done : found.start()])
            done = found.end()
            self._obey(found)
        self._put(text[done:])

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(tuple(row) for row in self.rows)

    def _put(self, text: str) -> None:
        for character in text:
            row, column = self.at
            if column == self.columns:
                row, column = row + 1, 0
            self._reach(row)
            cells = self.rows[row]
            cells += [(" ", Style.null())] * (column - len(cells))
            cells[column : column + 1] = [(character, self.style)]
            self.at = (row, column + 1)

    def _obey(self, found: re.Match[str]) -> None:
        row, column = self.at
        match found["act"] or found.group():
            case "\n":
                self.at = (row + 1, column)
                self._reach(row + 1)
            case "\r":
                self.at = (row, 0)
            case "A":
                self.at = (max(0, row - int(found["what"] or 1)), column)
            case "K":
                self.rows[row] = []
            case "m":
                self._dye([int(each or 0) for each in found["what"].split(";")])

    def _dye(self, codes: Sequence[int]) -> None:
        if codes[:1] == [0]:
            self.style = Style.null()
        for code in codes:
            self.style += Style.parse(SGR_STYLE_MAP.get(code, "none"))

    def _reach(self, row: int) -> None:
        while len(self.rows) <= row:
            self.rows.append([])


def picture(frames: Sequence[Frame], *, columns: int, title: str) -> str:
    """An SVG that shows the frames in turn, for ever; the last one alone to whoever wants no motion.

    Lines that are the same in successive frames are written once.
    """
    num_rows = max(len(frame.lines) for frame in frames)
    width, height = round(columns * ADVANCE) + 2 * MARGIN, num_rows * LEADING + 2 * MARGIN
    ends = [0.0]
    for frame in frames:
        ends.append(ends[-1] + frame.seconds)
    styles, groups = [], []
    for number, ((begin, end), lines) in enumerate(_spans(frames, num_rows).items()):
        if (begin, end) != (0, len(frames)):
            styles.append(_turns(number, ends[begin] / ends[-1], ends[end] / ends[-1], is_last=end == len(frames)))
        groups.append(f'<g class="k k{number}">{"".join(_drawn(row, line) for row, line in lines)}</g>')
    last = f".k{{animation:{ends[-1]:.2f}s step-end infinite}}"
    still = "@media(prefers-reduced-motion:reduce){.k{animation:none!important}}"
    edge = "@media(prefers-color-scheme: dark){rect{stroke:#30363d}}"  # or it would run into a page as dark as itself
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(title)}</title><style>text{{font:{SIZE}px ui-monospace,Menlo,Consolas,monospace;"
        f"fill:{INK};white-space:pre}}{last}{''.join(styles)}{still}{edge}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>{"".join(groups)}</svg>\n'
    )


def _spans(frames: Sequence[Frame], num_rows: int) -> dict[tuple[int, int], list[tuple[int, Line]]]:
    """Rows with what they show, by the frames that they show it in."""
    found: dict[tuple[int, int], list[tuple[int, Line]]] = {}
    for row in range(num_rows):
        begin = 0
        for line, shown in groupby(frame.lines[row] if row < len(frame.lines) else () for frame in frames):
            end = begin + len(list(shown))
            if line:
                found.setdefault((begin, end), []).append((row, line))
            begin = end
    return found


def _turns(number: int, begin: float, end: float, *, is_last: bool) -> str:
    """When a group is there; where nothing moves, whether it is at the end."""
    there = f"{begin:.3%}{{visibility:visible}}"
    gone = "" if is_last else f"{end:.3%}{{visibility:hidden}}"
    before = "" if begin == 0 else "0%{visibility:hidden}"
    still = "" if is_last else "visibility:hidden;"
    return f".k{number}{{{still}animation-name:a{number}}}@keyframes a{number}{{{before}{there}{gone}}}"


def _drawn(row: int, line: Line) -> str:
    y = MARGIN + row * LEADING + SIZE
    runs = "".join(_run(column, text, style) for column, text, style in _runs(line) if text.strip())
    return f'<text y="{y}">{runs}</text>'


def _runs(line: Line) -> Iterator[tuple[int, str, Style]]:
    column = 0
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in cells)
        bare = text.lstrip(" ")
        yield column + len(text) - len(bare), bare.rstrip(" "), style
        column += len(text)


def _run(column: int, text: str, style: Style) -> str:
    x, length = MARGIN + column * ADVANCE, len(text) * ADVANCE
    return f'<tspan x="{x:.1f}" textLength="{length:.1f}"{_look(style)}>{escape(text, quote=False)}</tspan>'


def _look(style: Style) -> str:
    colour = style.color.get_truecolor(THEME).hex if style.color and not style.color.is_default else None
    fill = colour or (FAINT if style.dim else None)
    return (f' fill="{fill}"' if fill else "") + (' font-weight="bold"' if style.bold else "")
