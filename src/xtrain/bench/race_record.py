"""Results as data: what `xtrain bench` writes and what pages read.

    Record                 one run of the command: machine, versions, date, settings
      Measurement          one race at one size and number of ranks
        ContestantResult   one contestant in it

All times are seconds, all sizes bytes.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class ContestantResult:
    """One contestant of a measurement.

    `seconds` is the median of the kept samples with its quartiles, None when every
    sample was dropped. `ratio` compares with the baseline (above 1 is faster), with
    the quartiles of the rounds' ratios; None for the baseline itself. `bytes_sent`
    holds what each rank's ledger counted for one call and equals the formula
    exactly; None where only the backend knows. `bytes_formula` is what the
    algorithm sends; `wire_bytes` what each rank's TCP sockets really sent in one
    call, the backend's headers included; `peak_bytes` the most memory that a rank
    took, where the race asks for it.
    """

    name: str
    seconds: float | None
    seconds_low: float | None
    seconds_high: float | None
    kept: int
    dropped: int
    calls: int
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    goal: float | None
    bytes_sent: list[int] | None
    bytes_formula: list[int] | None
    wire_bytes: list[int] | None
    peak_bytes: list[int] | None = None


@dataclass(frozen=True)
class Measurement:
    """One race at one size: the results, the baseline first.

    `other_load` is the median share of the machine that other processes used during
    the kept samples, None where the system does not tell.
    """

    race: str
    title: str
    size: int
    ranks: int
    backend: str
    rounds: int
    other_load: float | None
    results: list[ContestantResult]

    def result(self, name: str) -> ContestantResult:
        """The result of the contestant of that name; ValueError if it did not run."""
        for result in self.results:
            if result.name == name:
                return result
        ran = ", ".join(result.name for result in self.results)
        raise ValueError(f"{self.race}: no contestant {name!r}; there are: {ran}")


@dataclass(frozen=True)
class Record:
    """One run of `xtrain bench`, on one machine.

    `facts` are figures of the machine, measured then; see `machine.facts`.
    """

    schema: int
    name: str
    title: str
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    measurements: list[Measurement]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def measurement(self, race: str, size: int, ranks: int) -> Measurement:
        """The measurement of one race; ValueError if it was not run."""
        for found in self.measurements:
            if (found.race, found.size, found.ranks) == (race, size, ranks):
                return found
        raise ValueError(
            f"{self.name}: no measurement of {race!r}, {size} bytes on {ranks} ranks"
        )


def write(record: Record, path: Path) -> None:
    """Write the record; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(record), indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Record:
    """The record in a file.

    ValueError naming the place when a field is missing, unknown or of another type,
    or when the file was written under another schema.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a bench record of schema {SCHEMA}")
    return _build(Record, data, path.name)


def _required(kind: Any) -> set[str]:
    """Fields that every record has: those that came later have a default."""
    fields = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    return {f.name for f in fields if f.default is f.default_factory is missing}


def _build(kind: Any, data: Any, where: str) -> Any:
    """`data` as `kind`: a dataclass, a list, an optional or a plain type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected an object, got {data!r}")
        hints = typing.get_type_hints(kind)
        missing = sorted(_required(kind) - data.keys())
        extra = sorted(data.keys() - hints.keys())
        if missing or extra:
            raise ValueError(f"{where}: missing {missing}, unknown {extra}")
        values = {
            name: _build(hints[name], value, f"{where}.{name}")
            for name, value in data.items()
        }
        return kind(**values)
    if origin is types.UnionType:
        if data is None:
            return None
        return _build(arguments[0], data, where)
    if origin is list and isinstance(data, list):
        return [
            _build(arguments[0], item, f"{where}[{index}]")
            for index, item in enumerate(data)
        ]
    plain: Any = {float: (int, float)}.get(origin or kind, origin or kind)
    if not isinstance(data, plain) or (kind is not bool and isinstance(data, bool)):
        raise ValueError(f"{where}: expected {kind}, got {data!r}")
    return data


def new_output(folder: Path, name: str, another: bool) -> Path:
    """NAME.json, or for another machine the first of NAME-2.json, ... not there."""
    output, number = folder / f"{name}.json", 2
    while another and output.is_file():
        output, number = folder / f"{name}-{number}.json", number + 1
    return output


def partial(output: Path) -> Path:
    """Where the measurements of an unfinished run lie, so that it can be resumed."""
    return output.with_name(output.name + ".partial")


def finished(made: Record, path: Path | None) -> list[Measurement]:
    """The measurements of a record, finished or not, in which none lacks samples.

    ValueError when there is no such record, or when it comes from another machine,
    other versions or other settings: such measurements do not belong to the new ones.
    """
    if path is not None and partial(path).is_file():
        path = partial(path)
    if path is None or not path.is_file():
        raise ValueError(f"nothing to resume: no record {path or '(see --output)'}")
    old = read(path)
    for what in ("name", "machine", "versions", "settings"):
        before, now = getattr(old, what), getattr(made, what)
        if before != now:
            raise ValueError(f"cannot resume {path}: its {what} is {before}, not {now}")
    wanted = made.settings["rounds"]
    return [m for m in old.measurements if min(r.kept for r in m.results) >= wanted]
