"""Forms: what a parameter's value may be. Each form reads a value, explains what it takes and gives its JSON schema."""
