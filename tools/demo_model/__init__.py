"""The demo model: scripts that write its corpus and train it, its weights, and its report."""
