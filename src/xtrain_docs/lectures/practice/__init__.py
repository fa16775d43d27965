"""What the page on which drills are written shows."""
