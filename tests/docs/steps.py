"""Carries out a how-to: its diffs on a copy of the code, then the Python that says what holds afterwards."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = re.compile(r"^--- (?:a/)?(?P<before>\S+)\n\+\+\+ (?:b/)?(?P<after>\S+)\n", re.MULTILINE)
OURS = ("serve_app", "tests")
NO_FILE = "/dev/null"
WEIGHTS = shutil.ignore_patterns("__pycache__", "*.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One hunk: lines of a file in place of others; a new file where there were none."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Raises AssertionError where the old lines are not there exactly once."""
        target = root / self.file
        if not self.old:
            assert not target.exists(), f"{self.file} is there already"
            target.write_text(self.new, encoding="utf-8")
            return
        text = target.read_text(encoding="utf-8")
        count = text.count(self.old)
        assert count == 1, f"{self.file} has these lines {count} times:\n{self.old}"
        target.write_text(text.replace(self.old, self.new), encoding="utf-8")


def edits_of(page: str) -> Iterator[Edit]:
    """Every hunk of the page's diffs, in order."""
    for block in FENCE.finditer(page):
        if block["language"] == "diff":
            yield from _edits(block["body"])


def claims_of(page: str) -> list[str]:
    """The page's Python: what holds after its steps."""
    return [block["body"] for block in FENCE.finditer(page) if block["language"] == "python"]


def copy_of(repository: Path, target: Path, *folders: str) -> Path:
    """The code of these folders, without weights, and the cluster file."""
    for folder in folders:
        shutil.copytree(repository / folder, target / folder, ignore=WEIGHTS)
    shutil.copy(repository / "cluster.yaml", target)
    return target


def run(code: str, root: Path) -> None:
    """Run code with the package of `root` in the place of our own. Raises what it raises."""
    with imported_from(root):
        exec(compile(code, "how-to", "exec"), {"__name__": "how_to"})


@contextmanager
def imported_from(root: Path) -> Iterator[None]:
    """Within it, our packages are imported anew, from `root` where they are there. A process of its own would import
    torch anew, too."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in OURS}
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.modules.update(ours)


def _edits(diff: str) -> Iterator[Edit]:
    heads = list(FILES.finditer(diff))
    assert heads, f"a diff that names no file:\n{diff}"
    ends = [*(head.start() for head in heads[1:]), len(diff)]
    for head, end in zip(heads, ends, strict=True):
        assert head["before"] in (NO_FILE, head["after"]), "a diff of one file"
        for hunk in re.split(r"^@@.*\n", diff[head.end() : end], flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
            new = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
            yield Edit(file=head["after"], old=old, new=new)
