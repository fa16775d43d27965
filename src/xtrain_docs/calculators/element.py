"""A calculator as HTML: the form, and the answer for the values it begins with."""

import html
from typing import Any

from ..pyodide import is_ready
from .answers import CALCULATORS, answer
from .forms import read_values

WITHOUT = (
    "This copy of the site was built without Python for the browser: the answer below "
    "is for the values shown."
)

NEEDS_SCRIPTS = "Without scripts the answer below is for the values shown."


def element(name: str, **given: Any) -> str:
    """The element that `calculator.mjs` brings to life.

    In a `div`: Markdown takes a tag it does not know for a word of a paragraph, and a
    form would end that.
    """
    if name not in CALCULATORS:
        raise ValueError(f"no calculator {name!r}; there are: {', '.join(CALCULATORS)}")
    calculator = CALCULATORS[name]
    values = read_values(calculator.fields, given)
    fields = "".join(
        f'<div class="xt-field"><label for="xt-{name}-{field.name}">'
        f"{html.escape(field.label)}</label>"
        f"{field.control(f'xt-{name}-{field.name}', values[field.name])}</div>"
        for field in calculator.fields
    )
    ready = is_ready()
    button = '<button class="md-button" type="submit">Compute</button>' * ready
    return (
        f'<div><xtrain-calculator id="calculator-{name}" data-name="{name}">'
        f'<form aria-label="{html.escape(calculator.title)}">'
        f"<fieldset{' disabled' * (not ready)}>{fields}{button}</fieldset>"
        f"<noscript><p>{NEEDS_SCRIPTS}</p></noscript>"
        f'<p class="xt-status" role="status">{"" if ready else WITHOUT}</p></form>'
        f'<div class="xt-answer">{answer(name, values)}</div></xtrain-calculator></div>'
    )
