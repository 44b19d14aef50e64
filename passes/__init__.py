"""Passes over the `yolo` dialect, one a file."""
