"""Cross-entropy as a sum over valid tokens, divided once by their count.

Shapes: B batch, S sequence, V vocabulary.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import all_reduce_identity
from xtrain.comm.call_agreement import check_same_on, reduce_question
from xtrain.comm.checks import group_or_world, message_device
from xtrain.tensor_parallel import vocab_parallel_cross_entropy

IGNORED = -100


def count_labels(
    labels: Tensor,
    data: ProcessGroup | None = None,
    problem: str | None = None,
    mesh: Sequence[ProcessGroup] = (),
) -> Tensor:
    """How many labels are not -100, over all data ranks.

    Each rank sends besides whether its batch is wrong, so that all raise together. (A
    GPU asserts it there: to read it would make the CPU wait.)

    Args:
        problem: what is wrong on this rank.
        mesh: groups that reach all ranks of the mesh, if there are more than the data
            ranks. Those beside a data rank have the same labels.

    Raises:
        ValueError: on every rank of the mesh if one has a problem.
    """
    groups = mesh or ([] if data is None or data.size() == 1 else [data])
    count = None if problem is not None else (labels != IGNORED).sum()
    total = sum_unless(problem, count, groups, data)
    return total // prod(group.size() for group in groups if group is not data)


def sum_unless(
    problem: str | None,
    number: Tensor | None,
    groups: Sequence[ProcessGroup],
    data: ProcessGroup | None = None,
) -> Tensor:
    """A number's sum over these axes; ValueError on all ranks if one has a problem.

    Args:
        number: not needed of a rank with a problem.
        data: whose sum is wanted; the sum over the others is a check.
    """
    if not groups:
        if problem is not None:
            raise ValueError(problem)
        return torch.tensor(0) if number is None else number
    if number is None:
        number = torch.tensor(0, device=message_device(groups[0]))
    both = torch.stack([number, number.new_tensor(int(problem is not None))])
    for group in groups:
        if group is data:
            dist.all_reduce(both, group=group)
        else:
            reduce_question(both, group)
    if both.device.type != "cpu":
        if problem is not None:  # the others are told by the device
            raise ValueError(problem)
        torch._assert_async(both[1] == 0)
    elif both[1] > 0:
        if prod(group.size() for group in groups) == dist.get_world_size():
            groups = [group_or_world(None)]  # one exchange names all wrong ranks
        check_same_on("batches", groups, {}, problem)
    return both[0]


def mean_cross_entropy(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    tensor: ProcessGroup | None = None,
    data: ProcessGroup | None = None,
    count: Tensor | None = None,
    context: ProcessGroup | None = None,
) -> Tensor:
    """The mean loss of all tokens whose label is not -100, in at least fp32.

    Without any such token the loss is 0, and so are its gradients.

    Args:
        tensor: the ranks over which the vocabulary of the logits is cut.
        data: the ranks that bring other batches: the mean is over the tokens of all of
            them, and the gradients are this rank's share of that mean's.
        count: what `count_labels` gave for whole sequences, if it was called already.
        context: the ranks that have other tokens of the same sequences; with `count`.
    """
    if count is None:
        count = count_labels(labels_BS, data)
    total = sum_cross_entropy(logits_BSV, labels_BS, tensor)
    for others in (context, data):
        if others is not None and others.size() > 1:
            total = all_reduce_identity(total, others)
    return total / count.clamp(min=1)


def sum_cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, tensor: ProcessGroup | None = None
) -> Tensor:
    """The summed loss of this rank's tokens whose label is not -100, at least fp32."""
    logits, labels = logits_BSV.flatten(0, 1), labels_BS.flatten().long()
    if tensor is not None:
        return vocab_parallel_cross_entropy(
            logits, labels, reduction="sum", group=tensor
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits.to(wide), labels, ignore_index=IGNORED, reduction="sum"
    )
