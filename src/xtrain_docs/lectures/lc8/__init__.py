"""Lecture 8: all together."""
