"""Where a rank is, for the error that ends it: its step, its phase and its call.

    start | data | forward | backward | clip | optimizer | log |    of each step;
          | evaluate | sample | checkpoint | finish                 what is due after it

    rank 0   RuntimeError: Connection closed by peer
             rank 0, step 7, backward, in all_reduce (zero/flat.py:61)

A pipeline interleaves both directions: there the phase is "forward and backward", and
its own error names the action. Cost: one assignment a phase, and no message.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType

import torch.distributed as dist

from xtrain.comm.transport_errors import is_of_transport

THROUGH = ("distributed/distributed_c10d.py", "distributed/c10d_logger.py",
           "distributed/rendezvous.py", "comm/work.py", "comm/watched_work.py",
           "comm/transport_errors.py")  # fmt: skip
"""Files of torch and of ours that calls of a program go through."""


class Place:
    """Where this rank is.

    Attributes:
        step: the one under way, from 1; before the first one 0.
        phase: see above.
    """

    def __init__(self) -> None:
        self.step, self.phase = 0, "start"

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank begins a phase, of the same step unless another one is given."""
        if step is not None:
            self.step = step
        self.phase = phase

    def __str__(self) -> str:
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
        step = f"step {self.step}, " if self.step else ""
        return f"rank {rank}, {step}{self.phase}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error that leaves carries this place as a note, with its call."""
        try:
            yield
        except Exception as error:
            call = call_of(error)
            error.add_note(f"{self}, in {call}" if call else str(self))
            raise


def call_of(error: BaseException) -> str | None:
    """The call of communication that failed, and its line; None for other errors.

    An error that a backend raised in a call that had begun before is one of `wait`.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for link in reversed(chain):
        if is_of_transport(link) and (call := call_in(link.__traceback__)):
            return call
    return None


def call_in(trace: TracebackType | None) -> str | None:
    """The last line of the program, and what it called of torch.distributed.

    None if the traceback begins below the program.
    """
    place, called = "", "wait"
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_through(code):
            place, called = f"{short(code)}:{trace.tb_lineno}", "wait"
        elif called == "wait" and code.co_name != "wrapper":
            called = code.co_name
        trace = trace.tb_next
    return f"{called} ({place})" if place else None


def is_through(code: CodeType) -> bool:
    """Whether a call of a program goes through this code, see `THROUGH`."""
    return short(code) in THROUGH


def short(code: CodeType) -> str:
    """Its file, with the last one of its folders."""
    return "/".join(Path(code.co_filename).parts[-2:])
