"""What a rank does, one action after the other: a schedule is lists of these.

    2F0       forward of virtual stage 2 on micro-batch 0
    2B0       gradient of its input ("backward, input")
    2W0       gradients of its weights, some time after 2B0
    2BW0      both at once: the full backward
    2F4&5B1   one overlapped pair: a forward, and under it the full backward of another
              micro-batch, so that each hides the other's communication

Passes (`xtrain.schedules.passes`) add what has to be sent:

    2SEND_F0  send the output of stage 2       3RECV_F0  receive it, input of stage 3
    3SEND_B0  send the gradient of its input   2RECV_B0  receive it, of stage 2's output
    2REDUCE   sum the gradients of stage 2 over the data ranks

The numbers of virtual stages count the parts of the model from input to loss, whichever
rank holds them (`Schedule.rank_of`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

COMPUTE = ("F", "B", "W", "BW")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
REDUCE = "REDUCE"
FORM = re.compile(
    rf"(?P<stage>\d+)(?P<kind>{'|'.join(sorted((*COMPUTE, *MESSAGES), key=len)[::-1])})"
    rf"(?P<micro_batch>\d+)|(?P<reduced>\d+){REDUCE}"
)


@runtime_checkable
class OverlapsBackward(Protocol):
    """A stage's module that runs its forward and another's backward into each other.

    An overlapped pair is run by the module of the forward, if it has this; otherwise
    as the forward and then the backward. So it is, too, if the stage is to compute its
    forward again: that is run as a whole.
    """

    def forward_with_backward(self, inputs: tuple, backward: Any) -> Any:
        """What the module returns for `inputs`, when `backward` has been run as well.

        Args:
            backward: `backward()` runs it at once. To run it in parts, it has the other
                stage's `module`, and the `outputs` and `gradients` to begin with.
        """
        ...


@runtime_checkable
class RunsInPieces(Protocol):
    """A stage's module with a forward of its own for backwards that come in a pair."""

    def forward_in_pieces(self, *inputs: Any) -> Any:
        """What the module returns; used where the forward itself is in no pair."""
        ...


class Action(NamedTuple):
    """One thing that a rank does for one virtual stage and one micro-batch."""

    kind: str
    stage: int
    micro_batch: int = 0
    under: "Action | None" = None
    """Of an overlapped pair, whose `kind` is F: the full backward under the forward."""

    @property
    def parts(self) -> tuple["Action", ...]:
        """The forward and the backward of a pair; an action alone otherwise."""
        if self.under is None:
            return (self,)
        return (Action("F", self.stage, self.micro_batch), self.under)

    def __str__(self) -> str:
        if self.kind == REDUCE:
            return f"{self.stage}{REDUCE}"
        own = f"{self.stage}{self.kind}{self.micro_batch}"
        if self.under is None:
            return own
        return f"{own}&{self.under.stage}B{self.under.micro_batch}"


def parse_action(text: str) -> Action:
    """The action that `str` gave; raises ValueError for anything else."""
    first, ampersand, second = text.partition("&")
    if ampersand:
        forward, backward = parse_action(first), parse_action(second)
        if forward.kind != "F" or backward.kind not in ("B", "BW"):
            raise ValueError(f"{text!r}: a pair is a forward & a backward")
        return forward._replace(under=backward._replace(kind="BW"))
    found = FORM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not an action such as 2F0, 2B0, 2W0, 2BW0, 2F4&5B1"
        )
    if found["reduced"]:
        return Action(REDUCE, int(found["reduced"]))
    return Action(found["kind"], int(found["stage"]), int(found["micro_batch"]))


def parse_actions(text: str) -> tuple[Action, ...]:
    """The actions of one rank, with spaces between them."""
    return tuple(parse_action(word) for word in text.split())


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which every rank computes.

    Attributes:
        name: of the function that made it.
        ranks: how many ranks the pipeline has.
        micro_batches: how many parts the batch is cut into.
        chunks: parts of the model per rank; `ranks * chunks` virtual stages.
        placement: "loop" (stage s on rank s mod ranks), "v" (down the ranks and back
            up), or "mirror" (one stage a rank, and each a second time on the mirrored
            rank, for the micro-batches of the other direction).
        actions: of each rank, in order.
    """

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    placement: str
    actions: tuple[Sequence[Action], ...]

    @property
    def stages(self) -> int:
        """How many virtual stages the model is cut into."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Who computes this stage of this micro-batch."""
        if self.placement == "mirror":
            back = micro_batch >= self.micro_batches // 2
            return self.ranks - 1 - stage if back else stage
        turn, place = divmod(stage, self.ranks)
        if self.placement == "v" and turn % 2:
            return self.ranks - 1 - place
        return place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages whose weights this rank holds, in order."""
        if self.placement == "mirror":
            return tuple(sorted({rank, self.ranks - 1 - rank}))
        return tuple(s for s in range(self.stages) if self.rank_of(s, 0) == rank)

    @property
    def holders(self) -> tuple[int, ...]:
        """Of each virtual stage its rank; if mirrored, the first one of the two."""
        last = self.micro_batches - 1
        return tuple(
            min(self.rank_of(stage, 0), self.rank_of(stage, last))
            for stage in range(self.stages)
        )

    @property
    def parameter_copies(self) -> int:
        """How often the model's weights exist among the ranks."""
        return 2 if self.placement == "mirror" else 1

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, actions))}"
            for rank, actions in enumerate(self.actions)
        )
