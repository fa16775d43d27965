"""What a reader may enter: the fields of each calculator, and how they are checked.

Standard library only: the browser's Python runs this file.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A number in a range.

    Attributes:
        step: 1 for whole numbers, 0 for any.
    """

    name: str
    label: str
    value: float
    least: float
    most: float
    step: float = 1

    def read(self, text: str) -> float:
        """The value of what was entered; ValueError names the field and its range."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        whole = self.step != 1 or value == int(value) if math.isfinite(value) else False
        if not (self.least <= value <= self.most and whole):
            kind = "a whole number" if self.step == 1 else "a number"
            raise ValueError(
                f"{self.label}: {text!r} is not {kind} from {self.least:g} to "
                f"{self.most:g}"
            )
        return int(value) if self.step == 1 else value

    def control(self, at: str, value: object) -> str:
        """The input as HTML."""
        step = "1" if self.step == 1 else "any"
        return (
            f'<input id="{at}" name="{self.name}" type="number" required '
            f'min="{self.least:g}" max="{self.most:g}" step="{step}" '
            f'value="{html.escape(str(value))}">'
        )


@dataclass(frozen=True)
class Choice:
    """One of several words."""

    name: str
    label: str
    value: str
    choices: Sequence[str]

    def read(self, text: str) -> str:
        """What was chosen; ValueError names what there is."""
        if text not in self.choices:
            raise ValueError(
                f"{self.label}: {text!r} is not one of {', '.join(self.choices)}"
            )
        return text

    def control(self, at: str, value: object) -> str:
        """The selection as HTML."""
        options = "".join(
            f"<option{' selected' * (choice == value)}>{html.escape(choice)}</option>"
            for choice in self.choices
        )
        return f'<select id="{at}" name="{self.name}">{options}</select>'


@dataclass(frozen=True)
class Upload:
    """A file of the reader's, as text; it stays in the browser."""

    name: str
    label: str
    accept: str
    value: str = ""

    def read(self, text: str) -> str:
        """The text; "" for no file."""
        if len(text) > MOST_LETTERS:
            raise ValueError(f"{self.label}: more than {MOST_LETTERS} letters")
        return text

    def control(self, at: str, value: object) -> str:
        """The choice of a file; `calculator.mjs` puts its text into the other input."""
        return (
            f'<input id="{at}" type="file" accept="{self.accept}" '
            f'data-into="{self.name}">'
            f'<input name="{self.name}" type="hidden" '
            f'value="{html.escape(str(value))}">'
        )


MOST_LETTERS = 100_000
Field = Number | Choice | Upload


def read_values(
    fields: Sequence[Field], given: Mapping[str, object]
) -> dict[str, float | str]:
    """The value of each field: what was given, as text or number, or its default."""
    unknown = sorted(set(given) - {field.name for field in fields})
    if unknown:
        raise ValueError(f"no field is called {unknown[0]!r}")
    return {
        field.name: field.read(str(given.get(field.name, field.value)))
        for field in fields
    }
