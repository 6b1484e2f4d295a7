"""Every family of models that transformers knows: what the engine does with a small random one."""
