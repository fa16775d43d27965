"""Where a run writes its record, and which measurements of an older one it keeps."""

from pathlib import Path

from xtrain.bench import record


def new_output(folder: Path, name: str, another: bool) -> Path:
    """NAME.json, or for another machine the first of NAME-2.json, ... not there."""
    output, number = folder / f"{name}.json", 2
    while another and output.is_file():
        output, number = folder / f"{name}-{number}.json", number + 1
    return output


def partial(output: Path) -> Path:
    """Where the measurements of an unfinished run lie, so that it can be resumed."""
    return output.with_name(output.name + ".partial")


def finished(made: record.Record, path: Path | None) -> list[record.Measurement]:
    """The measurements of a record, finished or not, in which none lacks samples.

    ValueError when there is no such record, or when it comes from another machine,
    other versions or other settings: such measurements do not belong to the new ones.
    """
    if path is not None and partial(path).is_file():
        path = partial(path)
    if path is None or not path.is_file():
        raise ValueError(f"nothing to resume: no record {path or '(see --output)'}")
    old = record.read(path)
    for what in ("name", "machine", "versions", "settings"):
        before, now = getattr(old, what), getattr(made, what)
        if before != now:
            raise ValueError(f"cannot resume {path}: its {what} is {before}, not {now}")
    wanted = made.settings["rounds"]
    return [h for h in old.measurements if min(r.kept for r in h.results) >= wanted]
