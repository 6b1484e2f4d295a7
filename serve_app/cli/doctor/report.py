"""The doctor's checks, and its report: for a person, with a line for every check, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from serve_app.check.document import Severity
from serve_app.cli.doctor.gathering import (
    RESTART,
    Facts,
    Listener,
    Verdict,
    error,
    exit_code_of,
    gather,
    note,
    verdict,
    warning,
)
from serve_app.cli.screen import answer

NOT_SEEN = "nothing answers there: only the store was looked at"


def run(file: str, *, url: str | None = None, as_json: bool = False) -> int:
    """Look, and say what was seen; the exit code."""
    facts = gather(file, url=url)
    verdicts = examine(facts)
    code = exit_code_of(verdicts, was_seen=facts.was_seen)
    answer(object_of(facts, verdicts, code), "\n".join(lines_of(facts, verdicts)), as_json=as_json)
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
        for each in found:
            yield from told(each)
    counts = {severity: sum(each.severity is severity for each in verdicts) for severity in Severity}
    yield ", ".join(f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items())


def told(verdict: Verdict) -> Iterator[str]:
    """Yield what was found, how to mend it, and the commands that do."""
    yield f"  {verdict.severity:8} {verdict.check}: {verdict.found}"
    yield f"           {verdict.mend}"
    yield from (f"             $ {command}" for command in verdict.commands)


OTHERS = 0o077
PROXY_TLS = "docs/operations.md, TLS, has a proxy's whole configuration"
UNAUTHENTICATED = 401
CLOSED = frozenset({UNAUTHENTICATED, 503})
"""A proxy that is full refuses before anybody is asked for a key."""
START_RAY = "Start Ray with RAY_AUTH_MODE=token, as `serve_app up` does and `serve_app env` prints."


def check_bind(facts: Facts) -> Iterator[Verdict]:
    """Whoever reaches the port of a service that asks for no key may do everything."""
    if facts.open_doors and facts.asks_nobody:
        yield error(
            f"the service listens on {facts.open_doors[0]}, and asks nobody for a key",
            f"Bind loopback (`http_options: {{host: 127.0.0.1}}` in {facts.file}), or ask for keys"
            " (docs/how-to/give-a-team-a-key.md), and start it again.",
            f"serve_app check {facts.file}",
            f"serve_app up {facts.file}",
        )


def check_tls(facts: Facts) -> Iterator[Verdict]:
    """Keys cross the network as they are where nothing encrypts it, and go to anybody where no certificate is sound."""
    if facts.doubt is not None:  # whoever stands between a client and the service reads its keys
        yield warning(
            f"the certificate at {facts.url} is not trusted here: {facts.doubt}; no key was sent",
            "Have it signed by an authority that clients trust, for the name that they use, or name the"
            f" authority's own certificate in SSL_CERT_FILE; {PROXY_TLS}.",
            f"curl -sI {facts.url}/health",
        )
    if facts.open_doors and not facts.asks_nobody:
        is_encrypted = facts.url is not None and facts.url.startswith("https:")
        told = "" if is_encrypted else "; where TLS stands in front, name its address with --url"
        yield warning(
            f"the service listens without TLS on {facts.open_doors[0]}: keys and prompts cross the network as they are",
            f"Bind loopback and put a proxy with TLS in front; {PROXY_TLS}{told}.",
        )


def check_routes(facts: Facts) -> Iterator[Verdict]:
    """With keys, every route but /health and the console's own files is closed to whoever has none."""
    if facts.store is None and UNAUTHENTICATED not in facts.anonymous.values():
        return
    answered = {route: status for route, status in facts.anonymous.items() if status not in CLOSED}
    if answered:
        told = ", ".join(f"{method} {path} {status}" for (method, path), status in list(answered.items())[:4])
        yield error(
            f"{len(answered)} of {len(facts.anonymous)} routes answer somebody without a key: {told}",
            "Set `auth: keys` in the user_config of the router; what runs is not what the file says, or something"
            " else listens on that port.",
            f"serve_app check {facts.file}",
            f"serve_app up {facts.file}",
        )


def check_ray_dashboard(facts: Facts) -> Iterator[Verdict]:
    """Who may submit jobs to Ray runs code on its machines (CVE-2023-48022, CVE-2023-48023, CVE-2025-62593)."""
    opened = [url for url, status in facts.ray_answers.items() if status == 200]
    outside = [each for each in facts.listeners if each.is_outside and each.is_dashboard]
    if opened:
        severity = Severity.ERROR if outside else Severity.WARNING
        yield verdict(
            severity,
            f"Ray's dashboard answers {opened[0]} without its token: whoever reaches it runs code here",
            START_RAY,
            *RESTART,
        )
    elif outside:
        yield warning(
            f"Ray's dashboard listens on {outside[0]}; it wants its token, which crosses the network as it is",
            "Keep it on loopback, and reach it through a tunnel (ssh -L 8265:127.0.0.1:8265).",
            "ray start --head --dashboard-host=127.0.0.1",
        )


def check_ray_ports(facts: Facts) -> Iterator[Verdict]:
    """Ray's own ports carry code and pickled objects: loopback, or the token."""
    outside = [each for each in facts.listeners if each.is_outside and each.port != facts.port]
    rays = [each for each in outside if not each.is_dashboard and not _is_haproxy(each)]
    if not rays:
        return
    has_token = facts.environment.get("RAY_AUTH_MODE") == "token"
    ports = ", ".join(f"{each.port} ({each.holder.program})" for each in rays[:6])
    yield verdict(
        Severity.NOTE if has_token else Severity.ERROR,
        f"{len(rays)} of Ray's ports listen on every interface"
        f" {'and want its token' if has_token else 'without its token'}: {ports}",
        "Let a firewall keep all but the machines of the cluster from them; on one machine nobody needs them."
        if has_token
        else START_RAY,
        *((_firewall(sorted({each.port for each in rays})),) if has_token else RESTART),
    )


def check_haproxy(facts: Facts) -> Iterator[Verdict]:
    """Serve's template binds HAProxy's statistics to every interface; `serve_app up` puts them on loopback."""
    outside = [each for each in facts.listeners if each.is_outside and _is_haproxy(each) and each.port != facts.port]
    if outside:
        ports = sorted({each.port for each in outside})
        yield warning(
            f"HAProxy's statistics listen on every interface, without a key: {', '.join(map(str, ports))}",
            "Start it by `serve_app up`, which puts them on loopback unless you name a HAProxy yourself, or"
            " close them by a firewall.",
            "unset RAY_SERVE_HAPROXY_BINARY_PATH",
            f"serve_app up {facts.file}",
            _firewall(ports),
        )


def check_ray_token(facts: Facts) -> Iterator[Verdict]:
    """Ray's ports want a token, which is a secret."""
    if facts.environment and facts.environment.get("RAY_AUTH_MODE") != "token":
        yield verdict(
            Severity.ERROR if any(each.is_outside for each in facts.listeners) else Severity.WARNING,
            f"Ray runs with RAY_AUTH_MODE={facts.environment.get('RAY_AUTH_MODE', '(not set)')}:"
            " whoever reaches its ports runs code here",
            "Start Ray with the environment that `serve_app env` prints.",
            *RESTART,
        )
    if facts.token is not None and facts.token.is_open:
        yield error(
            f"other users of this machine can open {facts.token.path} (mode {facts.token.mode:o})",
            "Make it its owner's alone, and make another token if others use this machine.",
            f"chmod 600 {facts.token.path}",
        )


def check_store(facts: Facts) -> Iterator[Verdict]:
    """The store is there, is written ahead, and is its owner's alone."""
    store = facts.store
    if store is None:
        return
    if store.problem is not None:
        yield error(
            f"the store {store.shown} cannot be read: {store.problem}",
            "Look in the folder that the cluster was started in; the first command that makes a key makes it.",
            "serve_app keys create --admin",
        )
    if store.has_password:
        yield error(
            f"the address of the store in {facts.file} has a password, which Serve shows in its dashboard",
            "Leave it to libpq: in ~/.pgpass, mode 600.",
            "chmod 600 ~/.pgpass",
            f"serve_app check {facts.file}",
        )
    if store.journal_mode not in (None, "wal"):
        yield warning(
            f"{store.file} is written in journal mode {store.journal_mode}: readers wait for writers",
            "Any command on the store switches it to WAL; a network's file system cannot hold it: use a disk.",
            "serve_app keys list",
            f"sqlite3 {store.file} 'PRAGMA journal_mode'",
        )
    if store.mode is not None and store.mode & OTHERS:
        yield warning(
            f"others may open {store.file} (mode {store.mode:o}): names, scopes and bills",
            "Make it and what SQLite writes beside it their owner's alone.",
            f"chmod 600 {store.file}*",
        )


def check_pepper(facts: Facts) -> Iterator[Verdict]:
    """Without the pepper a stolen store opens no door; so it is the right one, a secret, and elsewhere."""
    if facts.store is None:
        return
    pepper, file = facts.store.pepper, facts.store.pepper.file
    if facts.store.problem is None and (pepper.problem is not None or pepper.source == "none"):
        yield error(
            f"no key opens the door: {pepper.problem or 'there is no pepper'}",
            f"Bring back the pepper from your copy, to {file} or SERVE_APP_PEPPER; it cannot be made again.",
            f"chmod 600 {file}",
            "serve_app keys list",
        )
    if pepper.mode is not None and pepper.mode & OTHERS:
        yield error(
            f"others may read the pepper {file} (mode {pepper.mode:o})",
            "Make it its owner's alone; if others use this machine, exchange pepper and keys.",
            f"chmod 600 {file}",
        )
    if pepper.is_beside_store:
        yield note(
            f"the pepper {file} is in the folder of the store: one copy of that folder has both",
            "Keep it elsewhere (`args.pepper`), or in SERVE_APP_PEPPER, and out of the store's backup.",
        )


def check_texts(facts: Facts) -> Iterator[Verdict]:
    """What a tenant sends and is answered is logged where an administrator wants it, and stays while the log does."""
    for tenant in facts.tenants:
        if tenant.log_texts > 0:
            yield note(
                f"prompts and completions of {tenant.name} are logged, {tenant.log_texts:.4g} of its requests",
                "Set it to 0 when you have seen what you needed; lines that are there stay as long as the log.",
                f"serve_app tenants set {tenant.name} --log-texts 0",
            )
            if facts.open_logs:
                yield error(
                    f"others may read these texts: {len(facts.open_logs)} logs of Ray's are open to them,"
                    f" {facts.open_logs[0]} among them",
                    "Start Ray with umask 077, as `serve_app up` does and `serve_app env` prints.",
                    f"chmod -R go-rwx {Path(facts.open_logs[0]).parent}",
                )


def _is_haproxy(listener: Listener) -> bool:
    return listener.holder.program == "haproxy"


def _firewall(ports: list[int]) -> str:
    listed = ", ".join(map(str, ports))
    return f"nft add rule inet filter input iifname != lo tcp dport '{{ {listed} }}' drop"


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
    Check(check_bind, "nobody is let in unasked from outside", needs_service=True),
    Check(check_routes, "nobody without a key is answered", needs_service=True),
    Check(check_tls, "no key crosses a network in the clear", needs_service=True),
    Check(check_ray_token, "Ray's ports want a token", needs_service=True),
    Check(check_ray_dashboard, "nobody submits jobs", needs_service=True),
    Check(check_ray_ports, "Ray listens on loopback", needs_service=True),
    Check(check_haproxy, "HAProxy shows nobody its statistics", needs_service=True),
    Check(check_store, "the store is there and its owner's alone"),
    Check(check_pepper, "the pepper is right, and its owner's alone"),
    Check(check_texts, "no tenant's prompts are logged"),
)


def examine(facts: Facts) -> list[Verdict]:
    """Return what every check finds."""
    usual = (f"serve_app check {facts.file}",)
    return [
        replace(found, check=check.name, commands=found.commands or usual)
        for check in CHECKS
        for found in check.find(facts)
    ]
