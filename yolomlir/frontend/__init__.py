"""From checkpoint files to the `yolo` dialect."""
