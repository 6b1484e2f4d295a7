"""Writes reports as Parquet, where pyarrow is installed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from serve_app.core.errors import InvalidRequest

CONTENT_TYPE = "application/vnd.apache.parquet"


def as_parquet(report: Sequence[Mapping[str, object]]) -> bytes:
    """Numbers as numbers, everything else as text. Raises InvalidRequest where there is no pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidRequest.refusing(
            "format",
            must="be json or csv here",
            found='"parquet"',
            remedy="Parquet needs pyarrow: .venv/bin/pip install -c constraints.txt -e '.[parquet]'"
            " where the router runs.",
        ) from None
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(each) for each in report]), written)
    return written.getvalue()
