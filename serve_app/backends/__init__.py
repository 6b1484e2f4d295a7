"""Backends: engines of others behind the replica's interface: vLLM computes logits, what is drawn is drawn here"""
