"""Lecture 1: communication."""
