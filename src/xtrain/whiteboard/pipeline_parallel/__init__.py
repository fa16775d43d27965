"""lc5: stages of a model on the ranks of a group, trained over send and receive."""
