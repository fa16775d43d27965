"""Lecture 5: pipeline parallelism."""
