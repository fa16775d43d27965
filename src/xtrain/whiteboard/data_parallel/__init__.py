"""lc2: data parallelism."""
