"""The weights below a data-flow picture, and what must hold of the whole picture."""

from torch import nn

from ...evidence import EvidenceError
from .runs_dataflow_case import Case
from .runs_dataflow_match import state_of
from .runs_dataflow_record import Recorder
from .runs_dataflow_rows import Row
from .runs_dataflow_sent import Waiting, by_rank


def weight_rows(
    case: Case, module: nn.Module, whole: nn.Module, recorder: Recorder,
    waiting: Waiting,
) -> list[Row]:  # fmt: skip
    """Every parameter and its gradient beside those of the dense twin."""
    dense, rows = dict(whole.named_parameters()), []
    for name, parameter in module.named_parameters():
        full = dense[name]
        assert full.grad is not None
        value = state_of(by_rank(parameter.detach()) or [], full.detach())
        grad = state_of(by_rank(parameter.grad) or [], full.grad)
        row = {"name": name, "letters": case.letters_of(name), "value": value}
        row |= {"grad": grad, "before_sum": None}
        if name in recorder.shared:
            point = recorder.shared[name]
            row["before_sum"] = state_of(by_rank(point.grad) or [], full.grad)
            waiting.claim_sum(full.grad)
        rows.append(row)
    return rows


def check_sums(name: str, rows: list[Row]) -> None:
    """EvidenceError unless partial is a state on the way to a sum only.

    What is partial among some ranks is the gradient of something they hold alike:
    the sum is that of a weight's gradient, and checked there.
    """
    for at, row in enumerate(rows):
        if row["kind"] != "tensor":
            continue
        below = rows[at + 1] if at + 1 < len(rows) else None
        above = rows[at - 1] if at else None
        for state, near, way in ((row["forward"], below, "forward"),
                                 (row["backward"], above, "backward")):  # fmt: skip
            summed = near is not None and near["kind"] == "band" and near[way]
            if state in ("partial", "largest") and not summed:
                raise EvidenceError(f"{name}: {row['name']} stays partial in {way}")


def check_weights(name: str, weights: list[Row]) -> None:
    """EvidenceError unless each weight and its gradient are the dense one's."""
    for row in weights:
        for key in ("value", "grad"):
            if not (row[key] or "").startswith(("replicated", "split")):
                raise EvidenceError(
                    f"{name}: {row['name']} has a {key} that is "
                    f"{row[key] or 'nothing of the dense one'}"
                )
