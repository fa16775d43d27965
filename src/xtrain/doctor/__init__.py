"""`xtrain doctor`: what this machine can run, one line per finding.

Each check looks or tries; nothing is guessed from names. `command` runs the checks,
each of which returns a `Finding`.
"""

from xtrain.doctor.finding import Finding

__all__ = ["Finding"]
