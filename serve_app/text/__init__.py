"""STRINGS <-> TOKENS: tokenizer, prompt encoding, incremental detokenizer, stop matcher."""
