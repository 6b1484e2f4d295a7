"""THE WIRE: requests, responses and errors as a client sees them. Pydantic lives here."""
