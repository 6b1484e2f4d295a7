"""Command line: `serve_app up | complete | chat | compare | explain | top | bench | models | …`."""

from serve_app.cli.main import main as main
