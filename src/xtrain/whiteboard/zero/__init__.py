"""lc3: sharding optimizer states, gradients and parameters."""
