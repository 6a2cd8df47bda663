"""Signatures of the vendors' callables, read from their packages as text (`scripts/read_signatures.py`)."""
