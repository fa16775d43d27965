"""lc1: collectives from send and receive."""
