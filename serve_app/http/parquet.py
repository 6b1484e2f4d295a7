"""Writes reports as Parquet, where pyarrow is installed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from serve_app.core.errors import InvalidRequest

CONTENT_TYPE = "application/vnd.apache.parquet"


def as_parquet(columns: Mapping[str, str], report: Sequence[Mapping[str, object]]) -> bytes:
    """columns: those of every line of the report, each with its type as JSON Schema has it

    Raises InvalidRequest where there is no pyarrow.
    """
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
    types = {"string": pyarrow.string(), "integer": pyarrow.int64(), "number": pyarrow.float64()}
    schema = pyarrow.schema([(name, types[each]) for name, each in columns.items()])
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(each) for each in report], schema=schema), written)
    return written.getvalue()
