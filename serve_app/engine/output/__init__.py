"""Output: turns sampled tokens into deltas, with text, endings and prompt reports."""
