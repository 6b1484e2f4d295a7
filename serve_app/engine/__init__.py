"""Engine: tokens in, deltas out. Continuous batching over torch, transformers and PEFT, in one thread."""
