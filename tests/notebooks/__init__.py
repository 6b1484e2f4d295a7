"""The notebooks: how they are executed, and what is committed of them."""
