"""Wire: requests, responses and errors as a client sees them, as pydantic models."""
