"""THE NOTEBOOK KIT: a client of a running service, its answers as tables, texts and figures; cells of prompts."""

from serve_app.lab.client import Client as Client
from serve_app.lab.magics import load_ipython_extension as load_ipython_extension
