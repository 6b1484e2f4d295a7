"""THE COMMAND LINE: `serve_app up | down | check | doctor | env | models | complete`."""

from serve_app.cli.main import main as main
