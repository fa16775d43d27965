"""Lecture 6: context parallelism."""
