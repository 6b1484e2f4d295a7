"""THE COMMAND LINE: `serve_app up | chat | complete | compare | explain | top | bench | models | adapters | tenants | …`."""

from serve_app.cli.main import main as main
