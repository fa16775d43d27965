"""The rows of a data-flow picture, from the module's input down to its output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...evidence import EvidenceError
from .runs_dataflow_case import Case
from .runs_dataflow_match import state_of
from .runs_dataflow_record import Call, Point, Recorder, Sent
from .runs_dataflow_sent import Placed, Waiting, by_rank, placed, sides_of

Row = dict[str, Any]


@dataclass
class Named:
    """A point that was recognised."""

    name: str
    forward: str
    backward: str | None


class Rows:
    """Rows made of what was recorded and the dense tensors.

    Attributes:
        found: the rows so far.
        waiting: collectives of the backward that are in none of them.
    """

    def __init__(self, case: Case, dense: dict[str, Point], recorder: Recorder):
        self.case, self.dense = case, dense
        self.found: list[Row] = []
        self.waiting = Waiting(recorder.backward, dense)
        upper: list[Named] = []
        for call, group in recorder.rows:
            lower = [self.recognised(point) for point in group]
            if call is not None:
                self.between(call, upper, lower)
            self.add(lower)
            upper = lower

    def recognised(self, point: Point) -> Named:
        """Which dense tensor a point is, and how."""
        values, grads = by_rank(point.value), by_rank(point.grad)
        for name, whole in self.dense.items():
            forward = state_of(values or [], whole.value)
            if forward is None:
                continue
            backward = None
            if grads is not None and whole.grad is not None:
                backward = state_of(grads, whole.grad)
                if backward is None:
                    raise EvidenceError(
                        f"{self.case.name}: the gradient of {name} is nothing of the "
                        "dense gradient"
                    )
            return Named(name, forward, backward)
        shape = list(point.value.shape)
        raise EvidenceError(f"{self.case.name}: a tensor {shape} is no dense tensor's")

    def between(self, call: Call, upper: list[Named], lower: list[Named]) -> None:
        """What a call does: bands where it sends, and the product between them."""
        above, below = ([one.name for one in group] for group in (upper, lower))
        ahead = [self.forward_of(sent, [*above, *below]) for sent in call.sent]
        if above == below:
            self.band(call, ahead, self.waiting.claim(above, grad=True))
            return
        top = [one for one in ahead if one.name in above]
        bottom = [one for one in ahead if one.name in below]
        dx = self.waiting.claim(above, grad=True)
        again = self.waiting.claim(above, grad=False)
        dy = self.waiting.claim(below, grad=True)
        if top or dx:
            self.band(call, top, dx, again)
            inner = self.changed(upper, top, "after", dx, "before")
            self.found.append(inner)
        for one in ahead:
            if one not in top and one not in bottom:
                self.inside(one)
        if call.weights:
            self.found.append({"kind": "product", "weights": call.weights,
                               "function": call.function})  # fmt: skip
        if bottom or dy:
            self.found.append(self.changed(lower, bottom, "before", dy, "after"))
            self.band(call, bottom, dy)

    def forward_of(self, sent: Sent, first: Sequence[str]) -> Placed:
        """A collective of forward; it must carry something of the dense twin."""
        names = [*first, *(name for name in self.dense if name not in first)]
        found = placed(sent.kind, sides_of(sent), names, self.dense, grad=False)
        if found is None:
            raise EvidenceError(
                f"{self.case.name}: a forward {sent.kind} carries no dense tensor"
            )
        return found

    def band(
        self,
        call: Call,
        forward: list[Placed],
        backward: Placed | None,
        again: Placed | None = None,
    ) -> None:
        self.found.append(
            {
                "kind": "band",
                "function": call.function,
                "forward": " ".join(one.kind for one in forward),
                "backward": backward.kind if backward else "",
                "again": again.kind if again else "",
            }
        )

    def inside(self, one: Placed) -> None:
        """A band of forward alone, inside a call, with the tensor before and after."""
        before = self.tensor([one.name], one.before, None)
        band = {"kind": "band", "function": "", "forward": one.kind, "backward": "",
                "again": ""}  # fmt: skip
        self.found += [before, band, self.tensor([one.name], one.after, None)]

    def changed(
        self,
        group: list[Named],
        forward: list[Placed],
        forward_side: str,
        backward: Placed | None,
        backward_side: str,
    ) -> Row:
        """The group on the inner side of a band."""
        (one,) = group
        ahead = getattr(forward[0], forward_side) if forward else one.forward
        back = getattr(backward, backward_side) if backward else one.backward
        return self.tensor([one.name], ahead, back)

    def add(self, group: list[Named]) -> None:
        """A row for tensors that appear together; one for each state of theirs."""
        for states in dict.fromkeys((one.forward, one.backward) for one in group):
            names = [n.name for n in group if (n.forward, n.backward) == states]
            beside = self.found and names[0] != group[0].name
            row = self.tensor(names, *states)
            self.found.append(row | {"beside": True} if beside else row)

    def tensor(self, names: list[str], forward: str, backward: str | None) -> Row:
        letters = {seam.name: seam.letters for seam in self.case.seams}
        return {
            "kind": "tensor",
            "name": ", ".join(names),
            "letters": letters[names[0]],
            "forward": forward,
            "backward": backward,
        }
