"""Whether Ray asks whoever reaches its own ports for its token, where others may reach the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from serve_app.check.findings import Finding

VARIABLE = "RAY_AUTH_MODE"
TOKEN = "token"  # nosec B105 # the mode's name


def check_ray_token(host: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """host: that others reach;  environment: Ray is started in it, with the token where it says nothing"""
    found = environment.get(VARIABLE, TOKEN)
    if found.lower() != TOKEN:  # as Ray reads it
        message = (
            f'{host} is reachable from outside, and there {VARIABLE} must be "{TOKEN}" or not be set, as without it'
            f" whoever reaches Ray's own ports runs code here; found {found!r} in your environment: unset it, or"
            " bind 127.0.0.1"
        )
        yield Finding(path=("http_options", "host"), message=message)
