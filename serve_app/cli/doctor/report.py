"""The doctor's report: for a person, with a line for every check, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from serve_app.check.findings import Severity
from serve_app.cli.doctor import doors, kept
from serve_app.cli.doctor.facts import Facts, Verdict, exit_code_of
from serve_app.cli.doctor.gathering import gather
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """name: of its verdicts; sound: what holds where it has none; needs_service: whether it sees only what runs"""

    name: str
    sound: str
    find: Callable[[Facts], Iterator[Verdict]]
    needs_service: bool = False


CHECKS = (
    Check(name="file", sound="the cluster file can be served", find=kept.check_file),
    Check(name="bind", sound="nobody is let in unasked from outside", find=doors.check_bind, needs_service=True),
    Check(name="routes", sound="nobody without a key is answered", find=doors.check_routes, needs_service=True),
    Check(name="tls", sound="no key crosses a network in the clear", find=doors.check_tls, needs_service=True),
    Check(name="headers", sound="headers are bounded and steer nothing", find=doors.check_headers, needs_service=True),
    Check(name="bodies", sound="bodies are bounded before they are read", find=doors.check_bodies, needs_service=True),
    Check(name="errors", sound="errors tell nothing of this machine", find=doors.check_errors, needs_service=True),
    Check(name="pages", sound="the page loads nothing of others", find=doors.check_pages, needs_service=True),
    Check(name="cors", sound="web pages call only where they are listed", find=doors.check_cors, needs_service=True),
    Check(
        name="addresses",
        sound="nothing is fetched that a request names",
        find=doors.check_addresses,
        needs_service=True,
    ),
    Check(
        name="adapters", sound="an adapter is a name and never a place", find=doors.check_adapters, needs_service=True
    ),
    Check(name="ray-token", sound="Ray's ports want a token", find=kept.check_ray_token, needs_service=True),
    Check(name="ray-dashboard", sound="nobody submits jobs", find=doors.check_ray_dashboard, needs_service=True),
    Check(name="ray-ports", sound="Ray listens on loopback", find=doors.check_ray_ports, needs_service=True),
    Check(name="haproxy", sound="HAProxy shows nobody its statistics", find=doors.check_haproxy, needs_service=True),
    Check(name="store", sound="the store is there and its owner's alone", find=kept.check_store),
    Check(name="pepper", sound="the pepper is right, and its owner's alone", find=kept.check_pepper),
    Check(name="keys", sound="keys of administrators end", find=kept.check_keys),
    Check(name="tenants", sound="every tenant has a limit and a cache of its own", find=kept.check_tenants),
    Check(name="texts", sound="no tenant's prompts are logged", find=kept.check_texts),
    Check(name="limits", sound="one request is bounded as usual", find=kept.check_limits),
    Check(name="models", sound="no pickled objects beside weights", find=kept.check_models),
    Check(name="debug", sound="no developer's switch is on", find=kept.check_debug, needs_service=True),
    Check(name="dumps", sound="a crash leaves no memory behind", find=kept.check_dumps, needs_service=True),
    Check(name="versions", sound="no version with a known hole", find=kept.check_versions),
)


def examine(facts: Facts) -> list[Verdict]:
    """Everything that there is to say."""
    return [replace(verdict, check=check.name) for check in CHECKS for verdict in check.find(facts)]
