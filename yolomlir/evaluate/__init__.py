"""COCO scoring, comparison, profiling, benchmarking."""
