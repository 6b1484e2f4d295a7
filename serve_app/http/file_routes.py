"""Takes in files of requests for batches, sends what is in a file, and deletes files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message, Receive

from serve_app.api.error_text import shown
from serve_app.core.batches import NewFile, seconds_of
from serve_app.core.errors import InvalidRequest, NotFound, Overloaded, RequestTimeout, UnsupportedMediaType
from serve_app.http.admin_routes import HEADERS, NUMBER, Endpoint, query_of
from serve_app.http.exchange import BODY_TIMEOUT_S, ClientGone, too_large
from serve_app.http.guard import Administer
from serve_app.http.settings import HttpSettings
from serve_app.router.batch_files import Ask, BatchFiles

BATCH = "batch"
EXPIRY = ("anchor", "seconds")
FIELDS = ("file", "purpose", *(f"expires_after[{each}]" for each in EXPIRY))
MAX_FIELD_BYTES = 4096
FORM_BYTES = 64 << 10
"""Of a body besides its file."""
MAX_UPLOADS = 8
"""Of one tenant, that a router takes in at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """ask: calls Accounts;  files: the folder that all routers share"""

    ask: Ask
    files: BatchFiles


def file_endpoints(batches: Batches, administer: Administer, settings: HttpSettings) -> Mapping[str, Endpoint]:
    """Return what answers, by the names of services."""
    uploads = asyncio.Semaphore(MAX_UPLOADS)

    async def add(request: Request) -> Response:
        query_of(request, ())
        if uploads.locked():
            raise Overloaded(f"{MAX_UPLOADS} files are being sent; retry in 1 s.", None, {"retry_after_s": 1})
        async with uploads:
            return await _add(request, batches, settings)

    async def show(request: Request) -> Mapping[str, object]:
        query_of(request, ())
        identity = request.scope["state"]["identity"]
        asked = {"id": request.path_params["id"], "tenant": identity.tenant.name}
        service = "delete_file" if request.method == "DELETE" else "show_file"
        return await administer(service, asked, identity.key_id)

    async def read(request: Request) -> Response:
        file = await show(request)
        if not await asyncio.to_thread(batches.files.has, str(file["id"])):
            raise NotFound(f"What was in the file {file['id']} is gone from the folder of files.")
        path = batches.files.path(str(file["id"]))
        return FileResponse(path, media_type="application/octet-stream", headers=HEADERS)

    async def remove(request: Request) -> Response:
        deleted = await show(request)
        await asyncio.to_thread(batches.files.remove, str(deleted["id"]))
        return JSONResponse(deleted, headers=HEADERS)

    return {"add_file": add, "read_file": read, "delete_file": remove}


async def _add(request: Request, batches: Batches, settings: HttpSettings) -> Response:
    """Write the file of a form into the folder, then into the store."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        found = shown(request.headers.get("content-type"))
        raise UnsupportedMediaType.refusing("Content-Type", must="be multipart/form-data", found=found)
    body = _Body(request.receive, settings.max_file_bytes + FORM_BYTES)
    bounded = Request({**request.scope, "app": None}, body.receive)
    try:
        form = await bounded.form(max_files=1, max_fields=len(FIELDS), max_part_size=MAX_FIELD_BYTES)
    except HTTPException as error:
        raise body.refusal or InvalidRequest(f"The form cannot be read: {error.detail}") from None
    try:
        new = await _written(form, batches.files, settings)
    finally:
        await form.close()
    tenant = request.scope["state"]["identity"].tenant.name
    try:
        told = await batches.ask("add_file", tenant, new, settings.max_files_bytes)
    except InvalidRequest:  # any other failure may have come after it was kept
        await asyncio.to_thread(batches.files.remove, new.id)
        raise
    return JSONResponse(told, headers=HEADERS)


async def _written(form: FormData, files: BatchFiles, settings: HttpSettings) -> NewFile:
    """Write the file of a form into the folder. Raises InvalidRequest, PayloadTooLarge."""
    for name in form:
        if name not in FIELDS:
            raise InvalidRequest.refusing("form", must=f"have the fields {', '.join(FIELDS)}", found=shown(name))
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InvalidRequest.refusing("file", must="be a file of the form", found="none")
    if purpose != BATCH:
        raise InvalidRequest.refusing("purpose", must='be "batch"', found=shown(purpose))
    if (file.size or 0) > settings.max_file_bytes:
        raise too_large(settings.max_file_bytes)
    sent = {each: form[f"expires_after[{each}]"] for each in EXPIRY if f"expires_after[{each}]" in form}
    written = str(sent.get("seconds"))
    expires = sent | ({"seconds": int(written)} if NUMBER.fullmatch(written) else {})
    seconds = seconds_of("expires_after", expires or None)
    file_id, num_bytes = await asyncio.to_thread(files.write, file.file)
    name = (file.filename or "").replace("\0", "") or "file"  # PostgreSQL refuses it
    return NewFile(id=file_id, name=name, purpose=BATCH, num_bytes=num_bytes, seconds=seconds)


class _Body:
    """A body of at most so many bytes, none of which comes too late. refusal: why no more of it is read

    What it raises is what the parser of forms expects: that closes the files that it began.
    """

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self.refusal: Exception | None = None
        self._receive = receive
        self._num_left = max_bytes
        self._max_bytes = max_bytes

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            self.refusal = RequestTimeout(f"Nothing of the body arrived within {BODY_TIMEOUT_S:g} s.")
            raise MultiPartException(str(self.refusal)) from None
        self._num_left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            self.refusal = ClientGone()
        elif self._num_left < 0:
            self.refusal = too_large(self._max_bytes)
        if self.refusal is not None:
            raise MultiPartException(str(self.refusal))
        return message
