"""vLLM as the engine of a replica: it computes logits and keeps keys and values. What is drawn is drawn here."""
