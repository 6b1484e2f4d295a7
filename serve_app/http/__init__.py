"""Web server: bytes in, bytes out; every failure is a JSON error. Uses Starlette, and no Ray."""
