"""Where traces go and how many, by settings or by the OTEL_* environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """endpoint: of an OTLP receiver over HTTP; None is what the environment says
    sample: share of the traces that begin here which are kept; None is what the environment says
    """

    endpoint: str | None = None
    sample: float | None = None


def wanted(settings: TraceSettings | None, environ: Mapping[str, str]) -> TraceSettings | None:
    """What the settings say, else the environment; None where nothing is to be traced."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if settings is not None:
        return settings
    is_otlp = environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    return TraceSettings() if is_otlp and any(environ.get(name) for name in ENDPOINTS) else None
