"""Command-line tools for compiler engineers."""
