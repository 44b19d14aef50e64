"""Running compiled models: plan, artifact, drivers."""
