"""The doctor's report: for a person, with a line for every check, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from serve_app.check.document import Severity
from serve_app.cli.doctor import checks
from serve_app.cli.doctor.facts import Facts, Verdict, exit_code_of
from serve_app.cli.doctor.gathering import gather
from serve_app.cli.screen import say, say_json

NOT_SEEN = "nothing answers there: only the store was looked at"


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
    """Return one object: `exit_code`, `url`, and under `checks` each with its findings."""
    told = [
        {
            "name": check.name,
            "makes_sure": check.sound,
            "was_looked_at": facts.was_seen or not check.needs_service or bool(found),
            "findings": found,
        }
        for check in CHECKS
        for found in [[asdict(each) for each in verdicts if each.check == check.name]]
    ]
    return {"exit_code": code, "url": facts.url, "checks": told}


def lines_of(facts: Facts, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line per check that is sound, and each finding with what mends it."""
    yield f"{facts.url or f'port {facts.port}: {NOT_SEEN}'}"
    for check in CHECKS:
        found = [each for each in verdicts if each.check == check.name]
        if not found and (facts.was_seen or not check.needs_service):
            yield f"  ok       {check.name}: {check.sound}"
        for verdict in found:
            yield from told(verdict)
    counts = {severity: sum(each.severity is severity for each in verdicts) for severity in Severity}
    yield ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items())


def told(verdict: Verdict) -> Iterator[str]:
    """Yield what was found, how to mend it, and the commands that do."""
    yield f"  {verdict.severity:8} {verdict.check}: {verdict.found}"
    yield f"           {verdict.mend}"
    yield from (f"             $ {command}" for command in verdict.commands)


@dataclass(frozen=True, slots=True)
class Check:
    """sound: what holds where it finds nothing;  needs_service: whether it sees only what runs"""

    find: Callable[[Facts], Iterator[Verdict]]
    sound: str
    needs_service: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__.removeprefix("check_").replace("_", "-")


CHECKS = (
    Check(checks.check_bind, "nobody is let in unasked from outside", needs_service=True),
    Check(checks.check_routes, "nobody without a key is answered", needs_service=True),
    Check(checks.check_tls, "no key crosses a network in the clear", needs_service=True),
    Check(checks.check_ray_token, "Ray's ports want a token", needs_service=True),
    Check(checks.check_ray_dashboard, "nobody submits jobs", needs_service=True),
    Check(checks.check_ray_ports, "Ray listens on loopback", needs_service=True),
    Check(checks.check_haproxy, "HAProxy shows nobody its statistics", needs_service=True),
    Check(checks.check_store, "the store is there and its owner's alone"),
    Check(checks.check_pepper, "the pepper is right, and its owner's alone"),
    Check(checks.check_texts, "no tenant's prompts are logged"),
)


def examine(facts: Facts) -> list[Verdict]:
    """Return what every check finds."""
    usual = (f"serve_app check {facts.file}",)
    return [
        replace(found, check=check.name, commands=found.commands or usual)
        for check in CHECKS
        for found in check.find(facts)
    ]
