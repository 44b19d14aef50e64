"""From linalg to machine code."""
