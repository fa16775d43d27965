"""Lecture 4: tensor and sequence parallelism."""
