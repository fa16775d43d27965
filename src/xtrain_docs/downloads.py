"""Links to files that lie in the page itself, and so need no server."""

import base64


def trace_link(trace: str, name: str, style: str = "") -> str:
    """A trace of two runs for a trace viewer, as a file of that name."""
    coded = base64.b64encode(trace.encode()).decode()
    look = f' style="{style}"' if style else ""
    return (
        f'<p{look}><a class="xt-download" download="{name}" '
        f'href="data:application/json;base64,{coded}">Download both as a trace</a></p>'
    )
