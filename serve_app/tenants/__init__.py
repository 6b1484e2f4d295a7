"""Who may do what and who used what: keys, tenants, limits, and where they are kept. Time is told to it."""
