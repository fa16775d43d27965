"""Lecture 7: expert parallelism."""
