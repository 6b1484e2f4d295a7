"""DIALECTS: one table per foreign API, with its defaults and the few meanings that contradict the others'."""
