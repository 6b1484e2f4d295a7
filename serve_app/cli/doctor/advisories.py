"""Versions of the packages below the service that are known to let somebody in, and which version no longer does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Advisory:
    """package: that had it, from version `since` on, until `fixed`, which is the first without it"""

    identifier: str
    package: str
    fixed: str
    since: str = "0"
    what: str

    def affects(self, version: str) -> bool:
        return _numbers(self.since) <= _numbers(version) < _numbers(self.fixed)


ADVISORIES = (
    Advisory(
        identifier="CVE-2025-62593",
        package="ray",
        fixed="2.52.0",
        what="a web page in a browser on this machine may have Ray's dashboard run code (DNS rebinding)",
    ),
    Advisory(
        identifier="CVE-2026-32981", package="ray", fixed="2.8.1", what="Ray's dashboard hands out files by their path"
    ),
    Advisory(
        identifier="CVE-2026-4372",
        package="transformers",
        since="4.56.0",
        fixed="5.3.0",
        what="a model's config.json runs code of others, though `trust_remote_code` is false",
    ),
    Advisory(
        identifier="CVE-2026-5241",
        package="transformers",
        since="5.2.0",
        fixed="5.3.0",
        what="a model of the kind LightGlue runs code of others",
    ),
    Advisory(
        identifier="CVE-2025-32434",
        package="torch",
        fixed="2.6.0",
        what="reading weights runs code of others, though `weights_only` is true",
    ),
    Advisory(
        identifier="CVE-2025-62727",
        package="starlette",
        since="0.39.0",
        fixed="0.49.1",
        what="a Range header takes the time of a server that hands out files",
    ),
    Advisory(
        identifier="CVE-2025-27516",
        package="jinja2",
        fixed="3.1.6",
        what="a chat template leaves its sandbox",
    ),
    Advisory(identifier="CVE-2025-43859", package="h11", fixed="0.16.0", what="one request may hide another"),
)
PACKAGES = tuple(dict.fromkeys(each.package for each in ADVISORIES))


def that_affect(versions: Mapping[str, str]) -> list[Advisory]:
    """versions: by package; of packages that are not there nothing"""
    return [each for each in ADVISORIES if each.package in versions and each.affects(versions[each.package])]


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version; what stands behind it, as `+cpu` or `rc1`, counts for nothing."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in release.group().split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
