"""lc6: attention over a sequence that is cut over the ranks of a group."""
