"""A simulator of the `gpu` level, in numpy."""
