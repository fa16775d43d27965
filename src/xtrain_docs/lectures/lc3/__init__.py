"""Lecture 3: ZeRO."""
