"""Has Serve's proxies accept clients as they come and speak HTTP as we want it spoken.

That is: bounded headers, declined upgrades, refusals that cost little. Serve has no setting for any of it. What it
does offer is to call a function in every process that serves HTTP, before its server starts
(RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH): `protect`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from serve_app.http.lobby import through_lobby
from serve_app.http.own_words import Beginning
from serve_app.http.shedding import Shedding
from serve_app.http.shortcut_end import Landing, opening
from serve_app.http.turnstile import Turnstile, settings_of_environment
from serve_app.http.written_refusals import WrittenRefusals

SHORTCUT = "SERVE_APP_PROXY_SHORTCUT"
"""0 has streams go through Serve all the way."""
UVICORNS_STARTUP = uvicorn.Server.startup
"""As it was; Serve asks for protection again for each port that it tries."""


def protect() -> list[Any]:
    """Have every HTTP server that this process starts from now on speak so, with one count for all its connections.

    Returns the middleware that Serve is to add: none.
    """
    landing = Landing()
    turnstile = Turnstile(settings_of_environment())
    startup = through_lobby(UVICORNS_STARTUP, turnstile, WrittenRefusals(turnstile.refusal))
    if os.environ.get(SHORTCUT, "1") != "0":
        startup = opening(landing, startup)
    protocol = protocol_of(turnstile, landing, Beginning())
    HTTP_PROTOCOLS["auto"] = protocol  # type: ignore[assignment]  # uvicorn imports names and takes all else as it is
    uvicorn.Server.startup = startup  # type: ignore[assignment, method-assign]
    return []


def protocol_of(
    turnstile: Turnstile, landing: Landing | None = None, beginning: Beginning | None = None
) -> Callable[..., Shedding]:
    """What uvicorn calls for each connection. landing: where routers bring pieces of streams; None has none"""
    refusals = WrittenRefusals(turnstile.refusal)
    return partial(Shedding, turnstile=turnstile, refusals=refusals, landing=landing, beginning=beginning)
