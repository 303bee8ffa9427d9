"""A plan drawn for people."""
