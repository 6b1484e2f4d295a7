"""FORMS: what a parameter's value may be. Each form reads a value, words what it takes and describes it as a schema."""
