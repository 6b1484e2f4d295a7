"""Routes of administrators: each hands its arguments to the admin service and returns its answer."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.error_text import shown
from serve_app.api.parse import read_json_object
from serve_app.api.paths import OF_ADAPTERS, OF_BATCHES, SERVICES, AdminPath
from serve_app.core.batches import CREATE_BATCH, IDEMPOTENCY_KEY
from serve_app.core.errors import InvalidRequest, NotFound
from serve_app.core.ledger import csv_of, report_in
from serve_app.core.machine import NEEDS_PYARROW
from serve_app.http.exchange import body_of
from serve_app.http.guard import ASK_FOR_KEYS, Administer

MAX_DEPTH = 8
FORMATS = ("json", "csv", "parquet")
"""Media types in which usage is reported; all other answers are JSON."""
NUMBER = re.compile(r"[0-9]{1,18}")
"""The largest number of an event; the store holds no larger one."""
Endpoint = Callable[[Request], Awaitable[Response]]
NO_FILES: Mapping[str, Endpoint] = MappingProxyType({})
HEADERS = {"cache-control": "no-store"}
"""No cache keeps an answer, as it may hold a key."""


def admin_routes(
    administer: Administer | None, *, max_body_bytes: int, of_files: Mapping[str, Endpoint] = NO_FILES
) -> list[Route]:
    """Return the routes; the guard decides who may call them.

    administer: None where nothing is kept; the routes answer then what is missing
    of_files: services that are carried out by the folder of files; without them nothing of batches is kept
    """

    async def answer(request: Request) -> Response:
        path: AdminPath = AdminPath(request.scope["route"].path)
        service = SERVICES[path, "GET" if request.method == "HEAD" else request.method]
        assert administer is not None
        if service.name in of_files:
            return await of_files[service.name](request)
        asked = query_of(request, service.query)
        form = asked.pop("format", "json")
        if form not in FORMATS:
            raise InvalidRequest.refusing("format", must=f"be one of {', '.join(FORMATS)}", found=shown(form))
        arguments = _merged(request.path_params, asked)
        if service.body is not None:
            body = await body_of(request, max_bytes=max_body_bytes)
            arguments = _merged(arguments, read_json_object(body, max_depth=MAX_DEPTH) if body else {})
        identity = request.scope["state"]["identity"]
        if service.name == CREATE_BATCH:
            arguments[IDEMPOTENCY_KEY] = request.headers.get("idempotency-key")
        if path is AdminPath.OWN_USAGE or path in OF_BATCHES:
            arguments["tenant"] = identity.tenant.name
        found = await administer(service.name, arguments, identity.key_id)
        if form == "csv":
            return Response(csv_of(found), headers={**HEADERS, "content-type": "text/csv; charset=utf-8"})
        if form == "parquet":
            written = await asyncio.to_thread(as_parquet, *report_in(found))  # its first call loads a large library
            return Response(written, headers={**HEADERS, "content-type": CONTENT_TYPE})
        return JSONResponse(found, headers=HEADERS)

    def endpoint(path: AdminPath) -> Endpoint:
        is_kept = administer is not None and (of_files or path not in OF_BATCHES)
        return answer if is_kept else refuse

    return [
        Route(path, endpoint(path), methods=[method for each, method in SERVICES if each is path])
        for path in AdminPath
        if path not in OF_ADAPTERS
    ]


async def refuse(request: Request) -> Response:
    """Say what a service lacks that keeps nothing of tenants."""
    raise NotFound(
        f"{request.method} {shown(request.scope['path'])} needs tenants with keys, and this service asks nobody for"
        f" a key. Its operator sets {ASK_FOR_KEYS}; `files` in the same args is the folder of files and batches."
    )


def query_of(request: Request, known: tuple[str, ...]) -> dict[str, object]:
    """Return the members of the query, numbers as numbers."""
    asked: dict[str, object] = {}
    for name, value in request.query_params.items():
        if name not in known:
            must = f"be one of {', '.join(known)}" if known else "not be sent here"
            raise InvalidRequest.refusing("query", must=must, found=shown(name))
        asked[name] = int(value) if name == "after" and NUMBER.fullmatch(value) else value
    return asked


def _merged(first: dict[str, object], second: dict[str, object]) -> dict[str, object]:
    """Return both together. Raises InvalidRequest if the body contradicts the address."""
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            must = f"be that of the address, {shown(first[name])}"
            raise InvalidRequest.refusing(name, must=must, found=shown(second[name]))
    return {**second, **first}


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
            remedy=f"{NEEDS_PYARROW} where the router runs.",
        ) from None
    types = {"string": pyarrow.string(), "integer": pyarrow.int64(), "number": pyarrow.float64()}
    schema = pyarrow.schema([(name, types[each]) for name, each in columns.items()])
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(each) for each in report], schema=schema), written)
    return written.getvalue()
