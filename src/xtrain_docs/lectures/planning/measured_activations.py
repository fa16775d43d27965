"""Activations of real runs beside what `xtrain.plan` says of them."""

from xtrain.plan import (
    decoder_activations,
    decoder_layer_activations,
    device_parameters,
    held_micro_batches,
)

from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from ...values import percent
from .measured_memory import measured, positions
from .runs_memory_cases import BATCH, CASES, SEQUENCE, Case

ALLOWED = 0.02
"""Of activations: tokens, positions and the count of labels are saved as well."""


def kept(case: Case, rank: int) -> float | None:
    """Bytes that autograd keeps at most, predicted; None where there is no formula."""
    shape, layout = case.shape, case.layout
    if shape.num_local_experts:
        return None
    sizes = BATCH, SEQUENCE // layout.context
    cut = {
        "itemsize": 2 if case.bf16 else 4,
        "tensor": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
    }
    whole = decoder_activations(shape, *sizes, **cut)  # type: ignore[arg-type]
    if layout.pipeline == 1:
        return whole
    layer = decoder_layer_activations(shape, *sizes, **cut)  # type: ignore[arg-type]
    stage = case.pipeline_rank(rank)
    held = device_parameters(shape, layout, stage).dense_layers * layer
    if stage == layout.pipeline - 1:
        held += whole - shape.num_hidden_layers * layer
    return held * held_micro_batches(layout, stage)


def check_activations(case: Case) -> list[dict[str, int]]:
    """What was measured; EvidenceError unless it is near the prediction."""
    found = measured(case)
    for rank, one in enumerate(found):
        right = kept(case, rank)
        if right and abs(one["activations"] / right - 1) > ALLOWED:
            raise EvidenceError(
                f"{case}, rank {rank}: {one['activations']} bytes of activations, "
                f"formula {right}"
            )
    return found


@REGISTRY
def measured_activations() -> Table:
    """Bytes that autograd saved at most in real runs, beside the prediction."""
    rows = []
    for name, case in CASES.items():
        found = check_activations(case)
        for position, rank in positions(case).items():
            stage = case.pipeline_rank(rank)
            here = [f for r, f in enumerate(found) if case.pipeline_rank(r) == stage]
            most = max(one["activations"] for one in here)
            right = kept(case, rank)
            if right is None:
                cells = ["–", "depends on the routing"]
            else:
                cells = [count(right), percent(most / right - 1, 1)]
            rows.append([name + position, str(case.ranks), count(most), *cells])
    header = ["run", "ranks", "measured", "predicted", "more"]
    return Table(header, rows, "lrrrr")
