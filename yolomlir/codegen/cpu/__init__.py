"""The CPU backend: linalg functions to object code, and a program a thread team runs."""
