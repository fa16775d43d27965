"""lc7: experts, of which every token chooses a few, over the ranks of a group."""
