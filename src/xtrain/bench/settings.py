"""How long a race is measured: the settings of a run, and what a race makes of them."""

import dataclasses
from dataclasses import dataclass

from xtrain.bench.race import Race


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure.

    `rounds` samples of each contestant are wanted, of at least `sample_seconds`
    each, in at most `most_rounds` rounds. `other_load_limit` is the share of the
    machine that others may use during a sample. After a dropped sample rank 0 waits
    for a quiet moment, altogether `patience` seconds in one measurement.
    """

    rounds: int = 15
    most_rounds: int = 45
    sample_seconds: float = 0.1
    warm_up_seconds: float = 0.2
    other_load_limit: float = 0.05
    patience: float = 30.0
    seed: int = 0


QUICK = Settings(
    rounds=5,
    most_rounds=10,
    sample_seconds=0.03,
    warm_up_seconds=0.05,
    other_load_limit=0.25,
    patience=0.0,
)
SINGLE_ROUNDS = 40  # times the rounds where a sample is a single call


def settings_for(race: Race, settings: Settings) -> Settings:
    """The settings of one race of a run: some races set their number of rounds.

    Where a sample is a single call there are more of them, and none is dropped.
    """
    if race.single:
        settings = dataclasses.replace(
            settings,
            rounds=SINGLE_ROUNDS * settings.rounds,
            most_rounds=SINGLE_ROUNDS * settings.most_rounds,
            other_load_limit=float("inf"),
        )
    if race.rounds is not None and race.rounds < settings.rounds:
        settings = dataclasses.replace(settings, rounds=race.rounds)
    return settings
