"""The error that says why a model is not served."""

from __future__ import annotations


class ModelNotSupported(ValueError):
    """The model has something that this engine does not carry out, or does not fit; the message names it."""
