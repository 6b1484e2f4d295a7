"""What is written in the repository's documents, compared with the code; `python -m tests.docs.write` writes tables anew."""
