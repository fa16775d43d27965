"""Races: our code against the usual choice, on this machine, in one run.

    xtrain bench --list
    xtrain bench lc1            every race of lecture 1; writes docs/data/bench/lc1.json
    xtrain bench lc1 --quick    a short look; writes nothing

To add races, write `xtrain/bench/races/NAME.py` with a `TITLE` and a list `RACES`;
`xtrain bench NAME` finds it. `xtrain.bench.race` defines a race,
`xtrain.bench.runner` runs it.
"""

from xtrain.bench.race import Case, Contestant, Goal, Race, RaceError, Trial

__all__ = ["Case", "Contestant", "Goal", "Race", "RaceError", "Trial"]
