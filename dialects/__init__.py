"""The `yolo` dialect: definition, builders, verifiers, layout rules."""
