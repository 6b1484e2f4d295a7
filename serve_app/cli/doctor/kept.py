"""Checks of what is kept and what is set: secrets, the store, limits, switches, versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from serve_app.check.document import Severity
from serve_app.cli.doctor.facts import RESTART, Facts, Verdict, error, note, verdict, warning
from serve_app.core.tenants import Scope

OTHERS = 0o077
DEBUG_SWITCHES = {
    "RAY_DEBUG": "a debugger may be attached to every task",
    "RAY_DEBUG_POST_MORTEM": "a task that fails waits for a debugger, with all that it knows",
    "RAY_PDB": "a task that fails waits for a debugger, with all that it knows",
    "PYTHONASYNCIODEBUG": "the loop writes what it carries to the log",
    "PYTHONINSPECT": "a program that ends leaves a prompt",
    "TRANSFORMERS_TRUST_REMOTE_CODE": "models may bring code",
    "SERVE_APP_LOG_MESSAGES": "messages of errors are logged whole, and with them what clients send",
}
NOISY = frozenset({"DEBUG", "debug"})


def check_file(facts: Facts) -> Iterator[Verdict]:
    """The file is what Serve will read the next time."""
    for line in facts.complaints:
        yield error(line, f"Correct {facts.file}; until then it cannot be served again.")


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


def check_keys(facts: Facts) -> Iterator[Verdict]:
    """Keys of administrators end some day, and no team has none by mistake."""
    for key in () if facts.store is None else facts.store.keys:
        if Scope.ADMIN in key.scopes and key.expires_at is None and key.revoked_at is None:
            yield note(
                f"{key.id} of {key.tenant} administers and never ends",
                "Exchange it for one that ends, and revoke it.",
                "serve_app keys create --admin --days 90",
                f"serve_app keys revoke {key.id}",
            )


def check_tenants(facts: Facts) -> Iterator[Verdict]:
    """A tenant without a limit may take everything; those of a group see each other's cached prefixes."""
    free = [each.name for each in facts.tenants if each.rights.patterns and each.limits.tokens_per_minute is None]
    if free:
        yield note(
            f"without a limit of tokens per minute: {', '.join(free[:8])}",
            "Weights share what there is; a limit bounds what one team can ask for and spend.",
            f"serve_app tenants set {free[0]} --tokens-per-minute 100000",
        )
    for group in sorted({each.cache_group for each in facts.tenants if each.cache_group is not None}):
        members = [each.name for each in facts.tenants if each.cache_group == group]
        if len(members) > 1:
            yield note(
                f"{', '.join(members)} share cached prefixes (group {group}), and may tell each other's by time",
                "Take out of the group whoever should not.",
                f"serve_app tenants set {members[0]} --cache-group none",
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


def check_limits(facts: Facts) -> Iterator[Verdict]:
    """What one request may ask for is not more than what the service is tried with."""
    from serve_app.check.bounds import raised_bounds  # imported here: it brings Ray, which takes its time

    for name, found, usual in raised_bounds(facts.content):
        yield note(
            f"{name} is {found}, more than the {usual} that the service is tried with",
            "Lower it, unless a request needs so much; what one may take, a thousand may take together.",
        )


def check_models(facts: Facts) -> Iterator[Verdict]:
    """Pickled objects are code. They are never loaded; where they lie beside the weights, somebody may yet do so."""
    if facts.pickles:
        yield note(
            f"pickled objects beside weights, which are not loaded here: {', '.join(facts.pickles)}",
            "Convert what you need to safetensors, and remove them.",
            f"rm {facts.pickles[0]}",
        )


def check_sources(facts: Facts) -> Iterator[Verdict]:
    """Adapters can be read on this machine from where they may come."""
    for line in facts.sources:
        yield warning(line, "Install or bring back what is named: until then no adapter can come from there.")


def check_debug(facts: Facts) -> Iterator[Verdict]:
    """Switches that are for a developer's own machine."""
    for name, effect in DEBUG_SWITCHES.items():
        if facts.environment.get(name, "0") not in ("", "0", "false", "False"):
            yield verdict(
                facts.worse_outside,
                f"{name}={facts.environment[name]}: {effect}",
                "Start the cluster without it.",
                f"unset {name}",
                f"serve_app up {facts.file}",
            )
    logging = facts.content.get("logging_config")
    if isinstance(logging, dict) and (logging.get("log_level") in NOISY or logging.get("enable_access_log") is True):
        yield warning(
            "Serve's own log is on (logging_config): it has addresses with whatever stands in them",
            "Write `log_level: WARNING` and `enable_access_log: false`; the router writes a line per request.",
        )


def check_dumps(facts: Facts) -> Iterator[Verdict]:
    """An image of a crashed process has prompts, and the digests' pepper."""
    if facts.num_dumping:
        yield warning(
            f"{facts.num_dumping} processes leave an image of their memory behind when they crash, prompts included",
            "Start the cluster from a shell, or a unit, that forbids it.",
            "ulimit -c 0",
            f"serve_app up {facts.file}",
        )


def check_versions(facts: Facts) -> Iterator[Verdict]:
    """Versions with a known hole."""
    if facts.holes is None:
        yield note(
            "nobody was asked whether installed packages have known holes",
            "Install pip-audit (the extra `audit`) and look again where PyPI can be reached.",
            "pip install 'serve_app[audit]'",
            "make audit",
        )
    for hole in facts.holes or ():
        newer = f"{hole.package}>={hole.fixed}" if hole.fixed else hole.package
        yield error(
            f"{hole.package} {hole.version} has {hole.identifier}",
            f"Install {hole.package} {hole.fixed} or newer." if hole.fixed else "No version without it is known.",
            f"pip install '{newer}'",
            "make audit",
        )
