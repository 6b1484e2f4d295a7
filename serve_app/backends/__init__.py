"""Engines of others behind the same replica: `vllm`."""
