"""The commands: what may be written behind `serve_app`, and who carries each of them out."""
