"""The virtual cluster: what its pages run and draw, a file for each page."""
