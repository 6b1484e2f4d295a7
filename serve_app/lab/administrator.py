"""What an administrator's key opens, for a notebook: teams with keys, published adapters, the ledger as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pandas

from serve_app.lab.client import Background
from serve_app.lab.wire import Wire

ADAPTERS = "/admin/adapters"


class Administrator:
    """Asks one service under an administrator's key. Failures are a ServiceError.

    http_client, background: as of `Client`
    """

    def __init__(self, url: str, key: str, *, http_client: Any = None, background: Background | None = None) -> None:
        self._wire = Wire(url.rstrip("/"), key, http_client)
        self.background = background if background is not None else Background()

    def key_of(self, team: str, **declared: Any) -> str:
        """A new key of a team, which is added with these fields (`weight`, `models`, `limits`, …), or gets them now."""
        if team in self.teams().index:
            self._send("patch", f"/admin/tenants/{quote(team, safe='')}", declared)
        else:
            self._send("post", "/admin/tenants", {"name": team, **declared})
        return str(self._send("post", "/admin/keys", {"tenant": team})["key"])

    def remove(self, team: str) -> None:
        """Remove a team with its keys; what it used stays in the ledger."""
        self._send("delete", f"/admin/tenants/{quote(team, safe='')}")

    def teams(self) -> pandas.DataFrame:
        """A row per team."""
        return pandas.DataFrame(self._rows("/admin/tenants")).set_index("name")

    def ledger(self, by: str = "tenant,model,adapter", **only: str) -> pandas.DataFrame:
        """What was used and what it cost: a row for each value of `by`, which are its index.

        only: `tenant`, and the days `since` and `until`
        """
        names = by.split(",")
        rows = self._rows(f"/admin/usage?{urlencode({'by': by, **only})}")
        return pandas.DataFrame(rows, columns=None if rows else pandas.Index(names)).set_index(names)

    def publish(self, name: str, folder: str | Path, *, in_place: bool = False, canary: str | None = None) -> str:
        """Publish an adapter on every replica, and return its version.

        folder:   as the service's machines see it, or an address (`s3://…`)
        in_place: replace what the name means now
        canary:   try it on this share of the requests for the name, such as "5%"
        """
        path = str(folder.absolute() if isinstance(folder, Path) else folder)
        body = {"lora_name": name, "lora_path": path, "load_inplace": in_place}
        told = self._send("post", ADAPTERS, body if canary is None else {**body, "canary": canary})
        return str((told["canary"] or told)["version"])

    def roll_back(self, name: str) -> str:
        """End a name's canary; without one, go back to the version before. Return the version that the name means."""
        return str(self._send("post", f"{ADAPTERS}/rollback", {"lora_name": name})["version"])

    def withdraw(self, name: str) -> None:
        """Serve an adapter no longer; its folder stays."""
        self._send("delete", f"{ADAPTERS}?{urlencode({'lora_name': name})}")

    def adapters(self) -> pandas.DataFrame:
        """A row per adapter: its version, who serves it, and its canary (`canary.share`, …) where it has one."""
        rows = list(self._rows(ADAPTERS))
        return (pandas.json_normalize(rows) if rows else pandas.DataFrame(columns=pandas.Index(["id"]))).set_index("id")

    def events(self, after: int = 0) -> pandas.DataFrame:
        """A row per change of teams, keys and adapters, the oldest first: 1000 at most, behind the event `after`."""
        return pandas.DataFrame(self._rows(f"/admin/events?{urlencode({'after': after})}"))

    def close(self) -> None:
        """Close connections and end the thread."""
        self.background.run(self._wire.close())
        self.background.close()

    def _rows(self, path: str) -> list[Mapping[str, Any]]:
        data: list[Mapping[str, Any]] = json.loads(self.background.run(self._wire.text(path)))["data"]
        return data

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return self.background.run(self._wire.send(method, path, body))
