"""Tensor parallelism: divides one model among several processes of a node and keeps them in step."""
