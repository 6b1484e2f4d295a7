"""Lets `python -m serve_app` be the command line."""

import sys

from serve_app.cli import main

sys.exit(main())
