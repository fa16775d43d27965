"""A cut module beside its dense twin: what each tensor on the way is, by its numbers.

Every rank runs both in float64 with the same weights and inputs. `data_flow` gives the
rows of a picture, from the module's input down to its output:

    tensor   a name of the dense twin, and its state forward and backward
    band     communication between two states: what runs forward, what backward
    product  a matmul, with the weights that it reads

An EvidenceError is raised if a tensor is nothing of the dense twin's, if a sum over the
ranks is missing where ranks go on by themselves, or if a message is in no band.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...evidence import EvidenceError
from .runs_dataflow_match import state_of
from .runs_dataflow_modules import CASES, Case
from .runs_dataflow_record import Call, Point, Recorder, Sent, recording

Row = dict[str, Any]


def data_flow(name: str) -> dict[str, Any]:
    """Rows and weights of the picture of one of CASES."""
    return flow_of(CASES[name], CASES[name].cut)


def flow_of(case: Case, cut: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """The same of any module: `cut` makes it of the dense one."""
    whole = case.dense()
    dense = run_dense(case, whole)
    module = cut(whole)
    recorder = Recorder(module)
    for tapped in case.taps:
        module.get_submodule(tapped).register_forward_hook(
            lambda _, args, out: (recorder.see([args[0]]), recorder.see([out]), None)[2]
        )
    x = local(case.input(), case.input_dim)
    if x.is_floating_point():
        x.requires_grad_()
    with recording(recorder):
        recorder.see([x])
        y = module(x, *case.others())
        recorder.see([y])
        recorder.begin_backward()
        (y * local(case.output_grad(), case.output_dim)).sum().backward()
    return Flow(case, dense, recorder).result(module, whole)


def run_dense(case: Case, whole: nn.Module) -> dict[str, Point]:
    """Every named tensor of the dense twin, with its gradient."""
    recorder, found = Recorder(whole), {}

    def keep(name: str, tensor: Tensor) -> None:
        recorder.see([tensor])
        points = [p for _, group in recorder.rows for p in group]
        found[name] = next(p for p in points if p.tensor is tensor)

    for seam in case.seams:
        module = whole.get_submodule(seam.module)
        module.register_forward_hook(
            lambda _, args, out, seam=seam: keep(
                seam.name, args[0] if seam.side == "in" else out
            )
        )
    x = case.input()
    if x.is_floating_point():
        x.requires_grad_()
    (whole(x, *case.others()) * case.output_grad()).sum().backward()
    return found


def local(full: Tensor, dim: int | None) -> Tensor:
    """This rank's slice of a dim, or all."""
    if dim is None:
        return full
    return full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def by_rank(tensor: Tensor | None) -> list[Tensor] | None:
    """What each rank has of it."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, tensor)
    return None if any(one is None for one in held) else held


@dataclass
class Named:
    """A point that was recognised."""

    name: str
    forward: str
    backward: str | None
    point: Point


@dataclass
class Placed:
    """A collective with the dense tensor it carries, and its state on both sides."""

    kind: str
    name: str
    before: str
    after: str


@dataclass
class Flow:
    """Rows of the picture, made of what was recorded and the dense tensors."""

    case: Case
    dense: dict[str, Point]
    recorder: Recorder
    rows: list[Row] = field(default_factory=list)

    def result(self, module: nn.Module, whole: nn.Module) -> dict[str, Any]:
        """The picture's data; EvidenceError where it is wrong."""
        self.waiting = [(sent, self.sides(sent)) for sent in self.recorder.backward]
        upper: list[Named] = []
        for call, group in self.recorder.rows:
            lower = [self.recognised(point) for point in group]
            if call is not None:
                self.between(call, upper, lower)
            self.add(lower)
            upper = lower
        weights = self.weights(module, whole)
        left = [sent.kind for sent, _ in self.waiting]
        left += [sent.kind for sent in self.recorder.stray]
        if left:
            raise EvidenceError(f"{self.case.name}: {left} are in no band")
        self.check(weights)
        return {
            "ranks": dist.get_world_size(),
            "rows": self.rows,
            "weights": weights,
        }

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
            return Named(name, forward, backward, point)
        shape = list(point.value.shape)
        raise EvidenceError(f"{self.case.name}: a tensor {shape} is no dense tensor's")

    def sides(self, sent: Sent) -> tuple[list[Tensor], list[Tensor]]:
        return by_rank(sent.before) or [], by_rank(sent.after) or []

    def placed(
        self, kind: str, sides: Sequence[list[Tensor]], names: Sequence[str], grad: bool
    ) -> Placed | None:
        """The collective, if it carries one of these dense tensors."""
        for name in names:
            whole = self.dense[name].grad if grad else self.dense[name].value
            if whole is not None:
                before, after = (state_of(side, whole) for side in sides)
                if before and after:
                    return Placed(kind, name, before, after)
        return None

    def claim(self, names: Sequence[str], grad: bool) -> Placed | None:
        """The first collective of backward that carries one of these, and is free."""
        for entry in self.waiting:
            found = self.placed(entry[0].kind, entry[1], names, grad)
            if found:
                self.waiting = [one for one in self.waiting if one is not entry]
                return found
        return None

    def between(self, call: Call, upper: list[Named], lower: list[Named]) -> None:
        """What a call does: bands where it sends, and the product between them."""
        above, below = ([one.name for one in group] for group in (upper, lower))
        ahead = [self.forward_of(sent, [*above, *below]) for sent in call.sent]
        if above == below:
            self.band(call, ahead, self.claim(above, grad=True))
            return
        top = [one for one in ahead if one.name in above]
        bottom = [one for one in ahead if one.name in below]
        dx, again = self.claim(above, grad=True), self.claim(above, grad=False)
        dy = self.claim(below, grad=True)
        if top or dx:
            self.band(call, top, dx, again)
            inner = self.changed(upper, top, "after", dx, "before")
            self.rows.append(inner)
        for one in ahead:
            if one not in top and one not in bottom:
                self.inside(one)
        if call.weights:
            self.rows.append({"kind": "product", "weights": call.weights,
                              "function": call.function})  # fmt: skip
        if bottom or dy:
            self.rows.append(self.changed(lower, bottom, "before", dy, "after"))
            self.band(call, bottom, dy)

    def forward_of(self, sent: Sent, first: Sequence[str]) -> Placed:
        """A collective of forward; it must carry something of the dense twin."""
        names = [*first, *(name for name in self.dense if name not in first)]
        found = self.placed(sent.kind, self.sides(sent), names, grad=False)
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
        self.rows.append(
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
        self.rows += [before, band, self.tensor([one.name], one.after, None)]

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
            beside = self.rows and names[0] != group[0].name
            row = self.tensor(names, *states)
            self.rows.append(row | {"beside": True} if beside else row)

    def tensor(self, names: list[str], forward: str, backward: str | None) -> Row:
        letters = {seam.name: seam.letters for seam in self.case.seams}
        return {
            "kind": "tensor",
            "name": ", ".join(names),
            "letters": letters[names[0]],
            "forward": forward,
            "backward": backward,
        }

    def weights(self, module: nn.Module, whole: nn.Module) -> list[Row]:
        """Every parameter and its gradient beside those of the dense twin."""
        dense, rows = dict(whole.named_parameters()), []
        for name, parameter in module.named_parameters():
            full = dense[name]
            assert full.grad is not None
            value = state_of(by_rank(parameter.detach()) or [], full.detach())
            grad = state_of(by_rank(parameter.grad) or [], full.grad)
            row = {"name": name, "letters": self.case.letters_of(name), "value": value}
            row |= {"grad": grad, "before_sum": None}
            if name in self.recorder.shared:
                point = self.recorder.shared[name]
                row["before_sum"] = state_of(by_rank(point.grad) or [], full.grad)
                self.claim_weight(full.grad)
            rows.append(row)
        return rows

    def claim_weight(self, grad: Tensor) -> None:
        """The sum of a shared weight's gradient is shown with the weight."""
        for entry in self.waiting:
            if state_of(entry[1][1], grad) == "replicated":
                self.waiting = [one for one in self.waiting if one is not entry]
                return

    def check(self, weights: list[Row]) -> None:
        """Partial is a state on the way to a sum only.

        What is partial among some ranks is the gradient of something they hold alike:
        the sum is that of a weight's gradient, and checked there.
        """
        for at, row in enumerate(self.rows):
            if row["kind"] != "tensor":
                continue
            below = self.rows[at + 1] if at + 1 < len(self.rows) else None
            above = self.rows[at - 1] if at else None
            for state, near, way in ((row["forward"], below, "forward"),
                                     (row["backward"], above, "backward")):  # fmt: skip
                summed = near is not None and near["kind"] == "band" and near[way]
                if state in ("partial", "largest") and not summed:
                    raise EvidenceError(
                        f"{self.case.name}: {row['name']} stays partial in {way}"
                    )
        for row in weights:
            for key in ("value", "grad"):
                if not (row[key] or "").startswith(("replicated", "split")):
                    raise EvidenceError(
                        f"{self.case.name}: {row['name']} has a {key} that is "
                        f"{row[key] or 'nothing of the dense one'}"
                    )
