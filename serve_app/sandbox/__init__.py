"""Sandbox: runs what clients and model makers wrote, in child processes with bounded time and memory."""
