"""Twelve recorded jobs that hang, or seem to: name the rank and the call to blame."""
