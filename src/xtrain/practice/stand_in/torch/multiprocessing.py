"""There are no processes in a page."""


class ProcessExitedException(Exception):
    """Of processes, which a page does not have."""


def start_processes(*args: object, **kwargs: object) -> None:
    raise RuntimeError("a page cannot start processes")
