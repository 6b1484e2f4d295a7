"""Notebook kit: a client of a running service that shows answers as tables, texts and figures; prompt cells."""

try:
    from serve_app.lab.client import Client as Client
    from serve_app.lab.magics import load_ipython_extension as load_ipython_extension
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"serve_app.lab needs {missing.name}, which comes with the extra: pip install -e '.[lab]'", name=missing.name
    ) from None
