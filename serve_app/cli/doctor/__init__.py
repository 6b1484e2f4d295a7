"""The doctor: what a running service lets in, measured on its machine, and how each finding is mended."""
