"""The first error of a rank in a step, kept until all ranks raise together.

A rank that fails cannot let its error out at once, as others wait for its messages. So
it keeps the error, sends what is expected of it, and computes no more.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from xtrain.comm.agreement import text_of
from xtrain.comm.transport_errors import is_of_transport, is_timeout
from xtrain.pipeline_parallel.agreement import NotReduced
from xtrain.pipeline_parallel.lost_ranks import (
    RankLost,
    naming_lost_ranks,
    write_failure,
)
from xtrain.schedules import Action


class StepFailure:
    """`error` is the first one of this rank; None before that."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.error: Exception | None = None

    def keep(self, error: Exception) -> None:
        """Keep it, unless there is one already."""
        self.error = self.error or error

    @contextmanager
    def caught(self, at: Action | str, reducing: bool = False) -> Iterator[None]:
        """Keep the error of what runs inside, with the action that raised it.

        Args:
            reducing: gradients are being summed. Such an error is often the effect of
                another rank's, whose reason is raised then.

        Raises:
            RankLost: a rank was lost, so the groups cannot be used any more. One that
                ended while gradients were summed is named at the end of the step.
        """
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            if is_of_transport(error) and (is_timeout(error) or not reducing):
                with naming_lost_ranks(None, self.group, at):
                    raise
            if self.error is None:
                self._keep_with_place(error, at, reducing)

    def _keep_with_place(
        self, error: Exception, at: Action | str, reducing: bool
    ) -> None:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        kind = NotReduced if reducing else kind
        name = "" if type(error) is kind else f"{type(error).__name__}: "
        place = at if isinstance(at, str) else f"{at}, stage {at.stage}"
        text = f"{place}: {name}{text_of(error)}"
        write_failure(text)  # to those that wait for this rank in its stage
        self.error = kind(text)
        self.error.__cause__ = error
