"""THE DOOR: bytes in, bytes out, every failure a JSON error. Starlette and uvicorn live here; Ray is not known."""
