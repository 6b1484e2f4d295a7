"""Reads the text that Prometheus reads into tables: every series, and a row per replica."""

from __future__ import annotations

import pandas
from prometheus_client.parser import text_string_to_metric_families

OF_REPLICAS = "serve_app_replica_"


def series(text: str) -> pandas.DataFrame:
    """A row per sample: its name, its labels in a column each, its value."""
    rows = [
        {"name": sample.name, **sample.labels, "value": sample.value}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return pandas.DataFrame(rows)


def replicas(text: str) -> pandas.DataFrame:
    """A row per replica: what it has in work, its free blocks, what it has done since it started."""
    rows: dict[str, dict[str, object]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(OF_REPLICAS) or sample.name.endswith(("_created", "_bucket")):
                continue
            name = sample.name.removeprefix(OF_REPLICAS) + (
                f"_{state}" if (state := sample.labels.get("state")) else ""
            )
            row = rows.setdefault(sample.labels["replica"], {"model": sample.labels["model"]})
            row[name.removesuffix("_total")] = sample.value
    return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("replica").sort_index()
