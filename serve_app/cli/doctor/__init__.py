"""Doctor: measures what a running service lets in on its machine, and says how to fix each finding."""
