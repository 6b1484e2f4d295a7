"""Where a service usually is, and the environment's variables that say otherwise."""

from __future__ import annotations

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "SERVE_APP_URL"
KEY_VARIABLE = "SERVE_APP_KEY"
"""With a key, which stays out of the list of processes there."""
KEY_VARIABLES = (KEY_VARIABLE, "SERVE_APP_API_KEY")
