"""Random entries that a calculator's fields allow: the tests ask page and Python."""

import random
from collections.abc import Sequence

from xtrain_docs.calculators.forms import Choice, Field, Upload


def random_values(fields: Sequence[Field], draw: random.Random) -> dict[str, str]:
    """One value for each field, as text."""
    values = {}
    for field in fields:
        if isinstance(field, Upload):
            values[field.name] = field.value
        elif isinstance(field, Choice):
            values[field.name] = draw.choice(list(field.choices))
        elif field.step == 1:
            most = min(field.most, max(field.least + 1, 4 * field.value))
            values[field.name] = str(draw.randint(int(field.least), int(most)))
        else:
            most = min(field.most, 2 * field.value or 1)
            values[field.name] = f"{draw.uniform(field.least, most):.3f}"
    return values
