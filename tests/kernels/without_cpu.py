"""A pytest plugin: the process finds no `serve_app/kernels/cpu`, as where the folder was left out."""

from __future__ import annotations

import sys

sys.modules["serve_app.kernels.cpu"] = None  # type: ignore[assignment]
