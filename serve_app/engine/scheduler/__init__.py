"""Scheduler: decides which sequences a step computes, and how much of each. Computes with no tensors."""
