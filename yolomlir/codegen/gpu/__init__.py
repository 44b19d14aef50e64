"""GPU kernels, one family a file."""
