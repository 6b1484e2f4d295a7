"""Checks of the doors: who reaches the service and Ray's own ports, and what is answered to somebody without a key."""

from __future__ import annotations

import re
from collections.abc import Iterator

from serve_app.check.document import Severity
from serve_app.cli.doctor.facts import RESTART, Facts, Listener, Verdict, error, verdict, warning

PROXY_TLS = "docs/operations.md, TLS, has a proxy's whole configuration"
UNAUTHENTICATED = 401
CLOSED = frozenset({UNAUTHENTICATED, 503})
"""A proxy that is full refuses before anybody is asked for a key."""
LEAKS = re.compile(r"Traceback|site-packages|/serve_app/\w+|\bFile \"")
PAGES = {"page": "/docs", "console": "/console"}
LOADED = re.compile(r"(?:src=|<link[^>]*href=)[\"'](https?://[^\"']+)")
PAGE_HEADERS = ("content-security-policy", "referrer-policy", "x-content-type-options", "x-frame-options")
START_RAY = "Start Ray with RAY_AUTH_MODE=token, as `serve_app up` does and `serve_app env` prints."
ANOTHER = "Something else than this service answers there; serve the router of serve_app.deployments.apps."


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


def check_headers(facts: Facts) -> Iterator[Verdict]:
    """A client's headers are bounded, and may not steer Serve."""
    bounded = facts.answers.get("long headers")
    if facts.was_seen and (bounded is None or bounded.status == 200):
        yield verdict(
            facts.worse_outside,
            "70 000 characters of headers are not refused: Serve's Python proxy bounds none",
            "Have HAProxy accept clients: start Ray with the environment that `serve_app env` prints.",
            *RESTART,
        )
    for probe in ("time limit", "staying"):
        answer = facts.answers.get(probe)
        if answer is not None and answer.status < 400:
            yield error(f"a client may steer Serve by a header ({probe}): it was answered {answer.status}", ANOTHER)


def check_bodies(facts: Facts) -> Iterator[Verdict]:
    """A body of a terabyte is refused by its length, before anything of it is read."""
    answer = facts.answers.get("large body")
    if facts.was_seen and (answer is None or answer.status < 400):
        yield verdict(
            facts.worse_outside,
            "a body of 2^40 bytes was not refused within 5 s",
            "Lower `max_body_bytes` in the user_config of the router, and look at what stands in front of it.",
        )


def check_errors(facts: Facts) -> Iterator[Verdict]:
    """An error has a request's id, and neither a stack nor a path."""
    answer = facts.answers.get("nowhere")
    if answer is not None and ("x-request-id" not in answer.headers or LEAKS.search(answer.body)):
        missing = "has no request id" if "x-request-id" not in answer.headers else "tells of this machine"
        yield warning(
            f"an error {missing}: {answer.status} {answer.body[:80]!r}",
            "Another program, or Serve itself, answers in the place of the router; see its route_prefix.",
        )


def check_pages(facts: Facts) -> Iterator[Verdict]:
    """Pages may load nothing of others, and stand in nobody's frame."""
    for name, path in PAGES.items():
        answer = facts.answers.get(name)
        if answer is None or answer.status != 200:
            continue
        missing = [header for header in PAGE_HEADERS if header not in answer.headers]
        others = LOADED.findall(answer.body)
        if missing or others:
            told = f"lacks {', '.join(missing)}" if missing else f"loads {others[0]}"
            yield warning(
                f"the page {path} {told}",
                "Let what stands in front of the service pass its headers and pages on as they are.",
                f"curl -si {facts.url}{path}",
            )


def check_cors(facts: Facts) -> Iterator[Verdict]:
    """Web pages call only where they are listed."""
    answer = facts.answers.get("strange page")
    if answer is not None and answer.headers.get("access-control-allow-origin") is not None:
        yield verdict(
            Severity.WARNING if not facts.asks_nobody else Severity.ERROR,
            "any web page that a person here opens may call the service: cors_origins has `*`",
            "List the pages that may call, in `cors_origins` of the router and of the tenants.",
            "serve_app tenants list",
            f"serve_app check {facts.file}",
        )
    for tenant in (each for each in facts.tenants if "*" in each.cors_origins):
        yield warning(
            f"any web page that has a key of {tenant.name} may call and read: its cors_origins has `*`",
            "List the pages that may.",
            f"serve_app tenants set {tenant.name} --cors-origins https://app.example.org",
        )


def check_addresses(facts: Facts) -> Iterator[Verdict]:
    """Whoever has the service fetch what they name reaches what it reaches: Ray's ports, or a cloud's secrets."""
    if facts.was_fetched:
        yield error("an image was fetched from the address that a request named", ANOTHER)


def check_adapters(facts: Facts) -> Iterator[Verdict]:
    """An adapter is one of those in the folder that the file names, and a client knows it by its name alone."""
    answer = facts.answers.get("place")
    if answer is not None and answer.status < 400:
        yield error(f"a request may name a folder as its adapter: it was answered {answer.status}", ANOTHER)


def _is_haproxy(listener: Listener) -> bool:
    return listener.holder.program == "haproxy"


def _firewall(ports: list[int]) -> str:
    listed = ", ".join(map(str, ports))
    return f"nft add rule inet filter input iifname != lo tcp dport '{{ {listed} }}' drop"
