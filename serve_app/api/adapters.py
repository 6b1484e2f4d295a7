"""Bodies and answers of the routes that publish adapters: vLLM's two, and those of administrators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.api.error_text import shown
from serve_app.api.forms.form import FLAG, Parameter, Text
from serve_app.api.limits import WireLimits
from serve_app.api.parse import read_members
from serve_app.core.bounded import Count
from serve_app.core.errors import InvalidRequest

PERCENTAGE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")
NAME = Parameter(Text(), "`base:adapter`, or the adapter's name alone where one base is served.")
LOAD: Mapping[str, Parameter] = {
    "lora_name": NAME,
    "lora_path": Parameter(
        Text(),
        "The adapter's folder, as all machines see it, or its address (`s3://…`), below an allowed one.",
    ),
    "canary": Parameter(Text(), 'Share of the requests for the name that this version is tried with, as "5%".'),
    "load_inplace": Parameter(FLAG, "Whether a name that is served may mean this version from now on."),
}
UNLOAD: Mapping[str, Parameter] = {"lora_name": NAME}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCall:
    """A folder that is to be published under a name. canary: its share of the requests; None is all of them"""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    canary: float | None = None


def parse_load(body: bytes, limits: WireLimits, *, path: str) -> LoadCall:
    """Read a folder and the name that it is published under. Raises InvalidRequest."""
    values = read_members(body, LOAD, limits, path=path, required="lora_name")
    if "lora_path" not in values:
        raise InvalidRequest.refusing("lora_path", must="be the folder of an adapter", found="nothing")
    if "canary" in values:
        values["canary"] = share_in(values["canary"])
    return LoadCall(**values)


def share_in(written: str) -> float:
    """Return the share that a percentage means. Raises InvalidRequest."""
    found = PERCENTAGE.fullmatch(written.strip())
    share = 0.0 if found is None else float(found[1]) / 100
    if not 0 < share < 1:
        must = 'be a percentage above 0% and below 100%, such as "5%"'
        raise InvalidRequest.refusing("canary", must=must, found=shown(written))
    return share


def parse_name(body: bytes, limits: WireLimits, *, path: str) -> str:
    """Read the name of an adapter. Raises InvalidRequest."""
    name: str = read_members(body, UNLOAD, limits, path=path, required="lora_name")["lora_name"]
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousVersion:
    """What a name meant before. version: digest of its files;  path: its folder"""

    version: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedVersion:
    """The requests of one version since its canary has its share, as the router that answers has counted them.

    errors: of these requests, those that the service failed;  None of seconds: too few requests say
    first_token_s, token_s: medians, to the first token and for each further one
    """

    requests: Count
    errors: Count
    first_token_s: float | None
    token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCanary:
    """A version that is tried.

    share:      of the requests for the name;  since: Unix seconds from which it has it;  by: who published it
    counted:    the canary's requests;  beside: those of the version that the name means
    divergence: mean over the scored requests, nats per token; None if none was scored yet
    scored:     so many requests
    held:       what it waits for, if it has had its share for longer than `hold_after_s`; else None
    """

    version: str
    path: str
    share: float
    since: float
    by: str
    counted: ListedVersion
    beside: ListedVersion
    divergence: float | None
    scored: Count
    held: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedAdapter:
    """One adapter as it is served now.

    id:           its address;  version: digest of its files;  path: its folder
    previous:     what `rollback` brings back; None if there was nothing
    published_at: Unix seconds; None if it was not published, but lies in the model's folder
    by:           the tenant that published it, or `operator`; None as before
    replicas:     ready ones that serve this version, of `ready_replicas`
    reason:       why it cannot be used; None for a usable one
    refused:      why the files in its watched folder are not published; None if they are, or if no folder is watched
    canary:       the version that is tried; None if there is none
    """

    id: str
    base: str
    name: str
    version: str
    path: str
    previous: PreviousVersion | None
    published_at: float | None
    by: str | None
    replicas: Count
    ready_replicas: Count
    reason: str | None
    refused: str | None
    canary: ListedCanary | None = None
