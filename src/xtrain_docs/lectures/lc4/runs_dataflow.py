"""A cut module beside its dense twin: what each tensor on the way is, by its numbers.

Every rank runs both in float64 with the same weights and inputs. `data_flow` gives the
rows of a picture, from the module's input down to its output:

    tensor   a name of the dense twin, and its state forward and backward
    band     communication between two states: what runs forward, what backward
    product  a matmul, with the weights that it reads

An EvidenceError is raised if a tensor is nothing of the dense twin's, if a sum over the
ranks is missing where ranks go on by themselves, or if a message is in no band.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...evidence import EvidenceError
from .runs_dataflow_case import Case
from .runs_dataflow_modules import CASES
from .runs_dataflow_record import Point, Recorder, recording
from .runs_dataflow_rows import Rows
from .runs_dataflow_weights import check_sums, check_weights, weight_rows


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
    return described(case, dense, recorder, module, whole)


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


def described(
    case: Case, dense: dict[str, Point], recorder: Recorder, module: nn.Module,
    whole: nn.Module,
) -> dict[str, Any]:  # fmt: skip
    """The picture's data; EvidenceError where it is wrong."""
    rows = Rows(case, dense, recorder)
    weights = weight_rows(case, module, whole, recorder, rows.waiting)
    left = [kind for kind, _ in rows.waiting.left]
    left += [sent.kind for sent in recorder.stray]
    if left:
        raise EvidenceError(f"{case.name}: {left} are in no band")
    check_sums(case.name, rows.found)
    check_weights(case.name, weights)
    return {"ranks": dist.get_world_size(), "rows": rows.found, "weights": weights}
