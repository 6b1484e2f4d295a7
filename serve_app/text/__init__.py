"""Text: tokenizer, prompt encoding, incremental detokenizer, stop matcher."""
