"""lc5: who computes what in which order, as lists that print as 2F0 2B0 2W0."""
