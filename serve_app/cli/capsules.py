"""The commands that keep a completion as a capsule, and that ask for it again and compare what comes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.cli.offering import URL, AsJson, Key, Url, service
from serve_app.cli.screen import CommandFailed, Exit, common_length, remark, say, say_json

ROUTE = "/v1/capsules/"
FILE = "capsule.json"
MEMBERS = {"service_version", "path", "dialect", "request", "parts"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
OF_CHOICES = ("finish_reason", "matched_stop")
OF_PARTS = ("model", "engine", "numerics", "prompt_tokens")
WARNS = "With other versions, numerics or engines tokens may differ."


def capture(
    id_: Annotated[str, typer.Argument(metavar="ID", help="Of the response, as its client read it.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where the capsule is written; it must be new.")] = FILE,
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Save a completion's request and tokens to a file that `replay` can repeat."""
    from urllib.parse import quote

    capsule = service(url, key).json(ROUTE + quote(id_, safe=""), member="parts")
    if as_json:
        say_json(capsule)
        return Exit.DONE
    try:
        with open(file, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as target:
            json.dump(capsule, target, indent=2)
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}. Name another file behind the id.") from None
    say(f"{file} has {_told(capsule)} of {capsule['id']}.")
    return Exit.DONE


def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A capsule, as `serve_app capture` wrote it.")],
    url: Url = URL,
    key: Key = None,
    as_json: AsJson = False,
) -> int:
    """Ask for a captured completion again, and say where the answer differs."""
    before = _read(Path(file))
    asked = replace(service(url, key, before["dialect"]), wants_capsule=True)
    answer = asked.json(before["path"], before["request"], member="id")
    after = asked.json(ROUTE + answer["id"], member="parts")
    conditions, found = list(other_conditions(before, after)), list(differences(before, after))
    if as_json:
        say_json({"is_same": not found, "differences": found, "conditions": conditions, "capsule": after})
        return Exit.FAILED if found else Exit.DONE
    for line in [*conditions, *([WARNS] if conditions else [])]:
        remark(line)
    for line in found or [f"The same: {_told(before)}."]:
        say(line)
    return Exit.FAILED if found else Exit.DONE


def other_conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Say what of the service and of the resolved request is otherwise than it was."""
    if before["service_version"] != after["service_version"]:
        yield _changed("service_version", before["service_version"], after["service_version"])
    for old, new in _paired(before, after):
        place = f"part {old['part']}: "
        yield from (place + _changed(name, old[name], new[name]) for name in OF_PARTS if old[name] != new[name])
        for group in ("sampling", "stop"):
            names = sorted(old[group].keys() | new[group].keys())
            pairs = [(name, old[group].get(name), new[group].get(name)) for name in names]
            yield from (place + _changed(name, was, now) for name, was, now in pairs if was != now)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Say where the completions differ. One that had not ended is compared as far as it came."""
    again_there = {each["part"] for each in after["parts"]}
    yield from (
        f"part {old['part']}: is not in the answer" for old in before["parts"] if old["part"] not in again_there
    )
    for old, new in _paired(before, after):
        if len(old["choices"]) != len(new["choices"]):
            yield f"part {old['part']}: had {len(old['choices'])} choices and has {len(new['choices'])}"
            continue
        for index, (was, now) in enumerate(zip(old["choices"], new["choices"], strict=True)):
            place = f"part {old['part']}, choice {index}: "
            then, again = was["token_ids"], now["token_ids"]
            has_ended = was["finish_reason"] is not None
            again = again if has_ended else again[: len(then)]
            if then != again:
                at = common_length([then, again])
                lengths = f"{len(then)} tokens then, {len(again)} now"
                yield f"{place}token {at} was {_at(then, at)} and is {_at(again, at)}; {lengths}"
            elif has_ended:
                yield from (
                    place + _changed(name, was[name], now[name]) for name in OF_CHOICES if was[name] != now[name]
                )
                if was["text"] != now["text"]:
                    at = common_length([was["text"], now["text"]])
                    yield f"{place}the tokens are the same, and the text differs from character {at} on"


def _paired(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the parts that are in both: some of a list may have been lost with their replica."""
    parts = {each["part"]: each for each in after["parts"]}
    yield from ((each, parts[each["part"]]) for each in before["parts"] if each["part"] in parts)


def _changed(name: str, was: object, now: object) -> str:
    return f"{name} was {was!r} and is {now!r}"


def _at(token_ids: list[int], at: int) -> str:
    return str(token_ids[at]) if at < len(token_ids) else "not there"


def _told(capsule: Mapping[str, Any]) -> str:
    choices = [choice for part in capsule["parts"] for choice in part["choices"]]
    return f"{len(choices)} completions with {sum(len(each['token_ids']) for each in choices)} tokens"


def _read(path: Path) -> dict[str, Any]:
    """Raises CommandFailed for what is no capsule."""
    try:
        capsule: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{path} cannot be read: {error}") from None
    if not isinstance(capsule, dict) or capsule.get("object") != "capsule" or not capsule.keys() >= MEMBERS:
        raise CommandFailed(f"{path} is no capsule; `serve_app capture ID` writes one.")
    if capsule["path"] not in PATHS or not isinstance(capsule["request"], dict):  # the key goes with what it names
        raise CommandFailed(f"{path} must hold a request of {', '.join(PATHS)}; found path {capsule['path']!r}.")
    return capsule
