"""The doctor's report: for a person, with a line for every check, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from serve_app.check.findings import Severity
from serve_app.cli.doctor.checks import CHECKS, examine
from serve_app.cli.doctor.facts import Facts
from serve_app.cli.doctor.gathering import gather
from serve_app.cli.doctor.verdicts import Verdict, exit_code_of
from serve_app.cli.screen import say, say_json

NOT_SEEN = "nothing answers there: only the file, the store and versions were looked at"


def run(file: str, *, url: str | None = None, as_json: bool = False) -> int:
    """Look, and say what was seen; the exit code."""
    facts = gather(file, url=url)
    verdicts = examine(facts)
    code = exit_code_of(verdicts, was_seen=facts.was_seen)
    if as_json:
        say_json(object_of(facts, verdicts, code))
    else:
        say("\n".join(lines_of(facts, verdicts)))
    return code


def object_of(facts: Facts, verdicts: Sequence[Verdict], code: int) -> dict[str, object]:
    """One object: `exit_code`, `url`, and under `checks` each with its findings."""
    checks = [
        {
            "name": check.name,
            "makes_sure": check.sound,
            "was_looked_at": facts.was_seen or not check.needs_service or bool(found),
            "findings": found,
        }
        for check in CHECKS
        for found in [[asdict(each) for each in verdicts if each.check == check.name]]
    ]
    return {"exit_code": code, "url": facts.url, "checks": checks}


def lines_of(facts: Facts, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """A line per check that is sound, and each finding with what mends it."""
    yield f"{facts.url or f'port {facts.port}: {NOT_SEEN}'}"
    for check in CHECKS:
        found = [each for each in verdicts if each.check == check.name]
        if not found and (facts.was_seen or not check.needs_service):
            yield f"  ok       {check.name}: {check.sound}"
        for verdict in found:
            yield from _told(verdict)
    counts = {severity: sum(each.severity is severity for each in verdicts) for severity in Severity}
    yield ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items())


def _told(verdict: Verdict) -> Iterator[str]:
    yield f"  {verdict.severity:8} {verdict.check}: {verdict.found}"
    yield f"           {verdict.mend}"
    yield from (f"             $ {command}" for command in verdict.commands)
