"""**Output**: sampled tokens become deltas: text, ends, reports of prompts."""
