"""Where keys and values live: a ledger of blocks, and storages that know their own layout."""
