"""Files and batches of tenants in the store, and what tenants may ask of them; what is in a file stands in a folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from hashlib import sha256
from secrets import token_hex
from typing import Any

from sqlalchemy import Connection, Engine, Row, Table, delete, func, insert, select, tuple_, update

from serve_app.core.batches import (
    CREATE_BATCH,
    ENDPOINTS,
    IDEMPOTENCY_KEY,
    OPEN_STATES,
    BatchState,
    NewFile,
    seconds_of,
)
from serve_app.core.errors import KeyReused
from serve_app.core.tenants import NANO
from serve_app.tenants import tables
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.lending import DAY_S
from serve_app.tenants.store import Author

Arguments = Mapping[str, object]
Answer = dict[str, object]
MAX_LISTED, LISTED = 10_000, 20
MAX_OPEN_BATCHES = 100
"""Of one tenant."""
MAX_PAIRS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Of a batch's metadata."""
NOUNS = {"files": "file", "batches": "batch"}
WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_HOURS = 168
NAMED = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")


class BatchStore:
    """Every call is one transaction. What belongs to another tenant is not there: NotThere is raised of it, too."""

    def __init__(self, engine: Engine, *, files_days: int) -> None:
        self._engine, self._files_days = engine, files_days
        self.services: Mapping[str, Callable[[Arguments, Author], Answer]] = {
            "list_files": self._list_files,
            "show_file": self._show_file,
            "delete_file": self._delete_file,
            "list_batches": self._list_batches,
            "show_batch": self._show_batch,
            CREATE_BATCH: self._create_batch,
            "cancel_batch": self._cancel_batch,
        }

    def add_file(self, tenant: str, file: NewFile, max_bytes: int) -> Answer:
        """Keep a file that a tenant has sent. max_bytes: of all of its files. Raises TenancyError where it is more."""
        with self._engine.begin() as connection:
            found = connection.execute(_tenants_row(tenant)).one_or_none()  # one upload of a tenant after the other
            if found is None:
                raise NotThere(f"There is no tenant {tenant!r}.")
            row = insert_file(connection, tenant, file, time.time(), days=self._files_days)
            held = select(func.sum(tables.files.c.bytes)).where(tables.files.c.tenant == tenant)
            num_bytes = int(connection.execute(held).scalar() or 0)
            if num_bytes > max_bytes:
                raise TenancyError(
                    f"file has {file.num_bytes} bytes, and the tenant's files may have {max_bytes} together"
                    f" (max_files_bytes); they have {num_bytes - file.num_bytes}. Delete some."
                )
        return told_of_file(row)

    def _list_files(self, arguments: Arguments, by: Author) -> Answer:
        purpose = arguments.get("purpose")
        where = [] if purpose is None else [tables.files.c.purpose == str(purpose)]
        return self._page(tables.files, arguments, told_of_file, where)

    def _show_file(self, arguments: Arguments, by: Author) -> Answer:
        with self._engine.connect() as connection:
            return told_of_file(_one(connection, tables.files, arguments)._asdict())

    def _delete_file(self, arguments: Arguments, by: Author) -> Answer:
        with self._engine.begin() as connection:
            file = _one(connection, tables.files, arguments)
            reads = select(tables.batches.c.id).where(
                tables.batches.c.input_file_id == file.id, tables.batches.c.state.in_(OPEN_STATES)
            )
            reader = connection.execute(reads.limit(1)).scalar()
            if reader is not None:
                raise TenancyError(f"The file {file.id} is read by the batch {reader}; cancel that first.")
            connection.execute(delete(tables.files).where(tables.files.c.id == file.id))
        return {"id": file.id, "object": "file", "deleted": True}

    def _list_batches(self, arguments: Arguments, by: Author) -> Answer:
        return self._page(tables.batches, arguments, told_of_batch, [])

    def _show_batch(self, arguments: Arguments, by: Author) -> Answer:
        with self._engine.connect() as connection:
            return told_of_batch(_one(connection, tables.batches, arguments)._asdict())

    def _create_batch(self, arguments: Arguments, by: Author) -> Answer:
        """Of one key there is one batch, as long as it is known: a repeat is told of it, as it is by then."""
        tenant, asked, key = str(arguments["tenant"]), _read_batch(arguments), arguments.get(IDEMPOTENCY_KEY)
        digits = token_hex(16) if key is None else sha256(f"{tenant}\0{key}".encode()).hexdigest()[:32]
        with self._engine.begin() as connection:
            connection.execute(_tenants_row(tenant))
            found = connection.execute(select(tables.batches).where(tables.batches.c.id == f"batch_{digits}")).first()
            if found is not None:
                was = {**found.told, "endpoint": found.endpoint, "input_file_id": found.input_file_id}
                if asked != {name: was.get(name) for name in asked}:
                    must, what = "be sent with the same request again", f"another than that of {found.id}"
                    raise KeyReused.refusing("Idempotency-Key", must=must, found=what)
                return told_of_batch(found._asdict())
            file = _one(connection, tables.files, {"tenant": tenant, "id": asked["input_file_id"]}, "input_file_id")
            if file.purpose != "batch":
                raise TenancyError(f'input_file_id must name a file of the purpose "batch"; found {file.purpose!r}.')
            is_open = (tables.batches.c.tenant == tenant, tables.batches.c.state.in_(OPEN_STATES))
            num_open = connection.execute(select(func.count()).select_from(tables.batches).where(*is_open)).scalar()
            if (num_open or 0) >= MAX_OPEN_BATCHES:
                raise TenancyError(f"The tenant has {num_open} batches that have not ended, which is the most; wait.")
            row = {
                "id": f"batch_{digits}", "tenant": tenant, "key_id": by.name, "model": "", "total": 0,
                "state": BatchState.VALIDATING.value, "outcome": BatchState.COMPLETED.value, "created_at": by.at,
                "expires_at": by.at + timedelta(hours=int(asked["completion_window"][:-1])).total_seconds(),
                **dict.fromkeys(tables.OF_BATCH, 0), "endpoint": asked.pop("endpoint"),
                "input_file_id": asked.pop("input_file_id"), "told": asked,
            }  # fmt: skip
            connection.execute(insert(tables.batches), [row])
        return told_of_batch(row)

    def _cancel_batch(self, arguments: Arguments, by: Author) -> Answer:
        with self._engine.begin() as connection:
            batch = _one(connection, tables.batches, arguments)
            if batch.state not in OPEN_STATES:
                raise TenancyError(f"The batch {batch.id} has ended already: it is {batch.state}.")
            if batch.outcome != BatchState.CANCELLED:
                enter(connection, batch, BatchState.CANCELLING, by.at, outcome=BatchState.CANCELLED)
            return told_of_batch(_one(connection, tables.batches, arguments)._asdict())

    def _page(
        self,
        table: Table,
        arguments: Arguments,
        told: Callable[[Mapping[str, Any]], Answer],
        where: list[Any],
    ) -> Answer:
        """Return the newest first, or with `order` `asc` the oldest, behind the one that `after` names."""
        most, order = _limit(arguments), arguments.get("order", "desc")
        if order not in ("asc", "desc"):
            raise TenancyError(f"order must be asc or desc; found {str(order)[:96]!r}.")
        place = (table.c.created_at, table.c.id)
        wanted = select(table).where(table.c.tenant == arguments["tenant"], *where)
        wanted = wanted.order_by(*(each.asc() if order == "asc" else each.desc() for each in place))
        with self._engine.connect() as connection:
            if (after := arguments.get("after")) is not None:
                row = _one(connection, table, {**arguments, "id": after}, "after")
                here, last = tuple_(*place), (row.created_at, row.id)
                wanted = wanted.where(here > last if order == "asc" else here < last)
            rows = connection.execute(wanted.limit(most + 1)).all()
        data = [told(row._asdict()) for row in rows[:most]]
        first, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last_id, "has_more": len(rows) > most}


def insert_file(connection: Connection, tenant: str, file: NewFile, at: float, *, days: int) -> dict[str, Any]:
    """Write the row of a file; return it. at: Unix seconds;  days: that it is kept where it says nothing"""
    seconds = days * DAY_S if file.seconds is None else file.seconds
    row = {
        "id": file.id, "tenant": tenant, "filename": file.name[:255], "purpose": file.purpose, "bytes": file.num_bytes,
        "created_at": at, "expires_at": at + seconds,
    }  # fmt: skip
    connection.execute(insert(tables.files), [row])
    return row


def enter(
    connection: Connection, batch: Row[Any], state: BatchState, at: float, *, outcome: BatchState, **told: object
) -> bool:
    """Move a batch on from the state that it was read in; False, and nothing is done, where it left that meanwhile."""
    moved = update(tables.batches).where(tables.batches.c.id == batch.id, tables.batches.c.state == batch.state)
    values = {**batch.told, f"{state.value}_at": at, **told}
    return bool(connection.execute(moved.values(state=state.value, outcome=outcome.value, told=values)).rowcount)


def told_of_file(row: Mapping[str, Any]) -> Answer:
    expires = row["expires_at"]
    return {
        "id": row["id"], "object": "file", "bytes": row["bytes"], "created_at": int(row["created_at"]),
        "expires_at": None if expires is None else int(expires), "filename": row["filename"],
        "purpose": row["purpose"], "status": "processed",
    }  # fmt: skip


def told_of_batch(row: Mapping[str, Any]) -> Answer:
    """Return OpenAI's object, with `cost` beside it."""
    told = row["told"]
    states = [state.value for state in BatchState if state is not BatchState.VALIDATING]
    times = {f"{state}_at": told.get(f"{state}_at") for state in states}
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    return {
        "id": row["id"], "object": "batch", "endpoint": row["endpoint"], "model": row["model"] or None,
        "input_file_id": row["input_file_id"], "completion_window": told["completion_window"], "status": row["state"],
        "errors": told.get("errors"), "output_file_id": told.get("output_file_id"),
        "error_file_id": told.get("error_file_id"), "metadata": told.get("metadata"),
        "created_at": int(row["created_at"]), "expires_at": int(row["expires_at"]),
        **{name: None if time is None else int(time) for name, time in times.items()},
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
        "usage": {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": row["cached_tokens"]},
            "output_tokens": completion, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
        "cost": row["cost"] / NANO,
    }  # fmt: skip


def _read_batch(arguments: Arguments) -> dict[str, Any]:
    """Return what is kept of a request for a batch. Raises TenancyError, InvalidRequest."""
    for name in arguments:
        if name not in (*NAMED, "tenant", "id", IDEMPOTENCY_KEY):
            raise TenancyError(f"{name[:96]!r} is not known here; there are {', '.join(NAMED)}.")
    file, endpoint = arguments.get("input_file_id"), arguments.get("endpoint")
    if not isinstance(file, str):
        raise TenancyError("input_file_id must be the id of a file that was sent to /v1/files.")
    if endpoint not in ENDPOINTS:
        raise TenancyError(f"endpoint must be one of {', '.join(ENDPOINTS)}; found {str(endpoint)[:96]!r}.")
    window = arguments.get("completion_window")
    found = WINDOW.fullmatch(window) if isinstance(window, str) else None
    if found is None or int(found[1]) > MAX_HOURS:
        raise TenancyError(f"completion_window must be 1h to {MAX_HOURS}h, such as 24h; found {str(window)[:96]!r}.")
    metadata = arguments.get("metadata")
    if metadata is not None and not _is_metadata(metadata):
        raise TenancyError(
            f"metadata must be an object of at most {MAX_PAIRS} strings of at most {MAX_VALUE_CHARS} characters, under"
            f" names of at most {MAX_NAME_CHARS}."
        )
    seconds = seconds_of("output_expires_after", arguments.get("output_expires_after"))
    told = {"completion_window": window, "metadata": metadata, "output_seconds": seconds}
    return {"input_file_id": file, "endpoint": endpoint, **told}


def _is_metadata(sent: object) -> bool:
    return (
        isinstance(sent, Mapping)
        and len(sent) <= MAX_PAIRS
        and all(len(name) <= MAX_NAME_CHARS for name in sent)
        and all(isinstance(value, str) and len(value) <= MAX_VALUE_CHARS for value in sent.values())
    )


def _limit(arguments: Arguments) -> int:
    sent = str(arguments.get("limit", LISTED))
    if not (sent.isascii() and sent.isdigit() and len(sent) < 6 and 1 <= int(sent) <= MAX_LISTED):
        raise TenancyError(f"limit must be 1 to {MAX_LISTED}; found {sent[:96]!r}.")
    return int(sent)


def _one(connection: Connection, table: Table, arguments: Arguments, param: str = "id") -> Row[Any]:
    """Return the row of the tenant's file or batch. Raises NotThere."""
    wanted = select(table).where(table.c.id == str(arguments["id"])[:64], table.c.tenant == arguments["tenant"])
    row = connection.execute(wanted).one_or_none()
    if row is None:
        raise NotThere(f"{param}: there is no {NOUNS[table.name]} {str(arguments['id'])[:64]!r}.")
    return row


def _tenants_row(tenant: str) -> Any:
    return select(tables.tenants.c.name).where(tables.tenants.c.name == tenant).with_for_update()
