"""lc8: a training step in which several parallelisms work together."""
