"""Links to files that are in the page itself, and so need no server."""

import base64


def data_url(text: str, kind: str = "text/x-python") -> str:
    """The text as the address of a file."""
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def trace_link(trace: str, name: str, style: str = "") -> str:
    """A trace of two runs for a trace viewer, as a file of that name."""
    look, link = (
        f' style="{style}"' if style else "",
        data_url(trace, "application/json"),
    )
    return (
        f'<p{look}><a class="xt-download" download="{name}" '
        f'href="{link}">Download both as a trace</a></p>'
    )
