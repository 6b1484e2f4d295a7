"""LoRA: adapters bound to a model, their slots, and the modules that apply them row by row."""
