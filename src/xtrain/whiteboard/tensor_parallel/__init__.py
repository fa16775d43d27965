"""lc4: layers cut over the ranks of a group."""
