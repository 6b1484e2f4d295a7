"""The decoder of llama-like models as one loop of ours, and linears whose weights are laid out for this machine."""
