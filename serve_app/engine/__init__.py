"""TOKENS IN, DELTAS OUT: continuous batching over torch, transformers and peft, in one thread."""
