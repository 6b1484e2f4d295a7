"""THE CHECK: a cluster file validated strictly; Serve itself accepts unknown keys at every level without a word."""
