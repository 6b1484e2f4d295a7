"""Scheduler: decides which sequences a step computes, and how much of each. Holds no tensors."""
