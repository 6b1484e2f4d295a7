"""Tenants: keys, limits and the ledger, and where they are kept. Callers pass the time in."""
