"""What the doctor says: a verdict for each thing that was found, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.check.findings import Severity

SOUND, ILL, SUSPECT, NOT_SEEN = 0, 1, 3, 4
"""Exit codes. 2 is that of a command line that was not understood."""
RESTART = (
    "ray get-auth-token --generate > /dev/null",
    'eval "$(serve_app env)"',
    "ray stop",
    "ray start --head --dashboard-host=127.0.0.1",
)
"""Shell lines that start Ray anew on one machine, with its token and our environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One finding of one check.

    check:    its name, which stays the same over versions; it stands in the list of checks alone
    severity: an error lets somebody do what they must not; a warning may, with something else; a note is to be known
    found:    what was seen, with its figures
    mend:     what to do about it, a whole sentence
    commands: that do it, each a line of shell
    """

    severity: Severity
    found: str
    mend: str
    commands: tuple[str, ...] = ()
    check: str = ""


def exit_code_of(verdicts: Iterable[Verdict], *, was_seen: bool) -> int:
    """1 where there is an error, 3 where there are warnings alone, 0 where neither.

    was_seen: whether a service ran and was looked at; where none did, what is otherwise sound is 4
    """
    severities = {each.severity for each in verdicts}
    if Severity.ERROR in severities:
        return ILL
    if Severity.WARNING in severities:
        return SUSPECT
    return SOUND if was_seen else NOT_SEEN
