"""KV cache: a ledger of blocks, storages that hold keys and values, and plans of a step's attention."""
