"""Tool calls: parses the calls in a model's text as it arrives, in the form of each model family."""
