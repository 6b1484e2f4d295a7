"""SANDBOX: runs what clients and model makers wrote, in child processes whose time and memory the kernel bounds."""
