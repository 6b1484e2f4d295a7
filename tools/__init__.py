"""Tools of the repository that are no part of the package: how the demo model is made."""
