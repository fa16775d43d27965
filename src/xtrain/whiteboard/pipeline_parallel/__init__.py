"""lc5: stages of a model, and what their memory and their gradients take."""
