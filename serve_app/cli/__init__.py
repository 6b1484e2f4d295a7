"""THE COMMAND LINE: `serve_app up | down | check | env | models | complete`."""

from serve_app.cli.main import main as main
