"""From logits to tokens: candidates, truncation, counter-based draws, logprobs."""
