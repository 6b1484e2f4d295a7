"""The version of the package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def service_version() -> str:
    """Return the version of the package; "0" where it is not installed."""
    try:
        return version("serve_app")
    except PackageNotFoundError:
        return "0"
