"""The repository's documents, compared with the code; `python -m tests.docs.write` writes their tables anew."""
