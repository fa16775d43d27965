"""Lecture 2: data parallelism."""
