"""The verification record: what the last test run proved on this machine."""

import json
from pathlib import Path

from xtrain.doctor.finding import Finding, checkout


def record_folder() -> Path:
    """Where a test run writes the verification record."""
    return (checkout() or Path.cwd()) / "build" / "verification"


def check_record() -> Finding:
    folder = record_folder()
    files = sorted(folder.glob("*.json"))
    if not files and not checkout():
        return Finding(
            "record", "note", "none; the tests, which write it, come with the source"
        )
    if not files:
        return Finding("record", "note", f"none in {folder}; `make test` writes it")
    texts = []
    for file in files:
        try:
            record = json.loads(file.read_text())
            about = record["about"]
            symbols = {
                symbol
                for entry in record["entries"].values()
                for symbol, places in entry["value"]["ran"].items()
                if places is not None
            }
            texts.append(
                f"{file} ({len(symbols)} symbols, {about['created'][:10]}, "
                f"torch {about['torch']})"
            )
        except (ValueError, KeyError, TypeError) as error:
            return Finding("record", "problem", f"{file} cannot be read: {error!r}")
    return Finding("record", "ok", "; ".join(texts))
