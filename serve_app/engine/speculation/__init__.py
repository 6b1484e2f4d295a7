"""Speculation: guesses what a sequence copies, computes the guesses along, and draws as without them."""
