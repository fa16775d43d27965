"""A training step of an `XtrainModel` in a layout of the plan, counted by a cluster.

Every rank is a thread with real tensors on the CPU, its weights in fp32. The second
step counts: in the first one the ranks of a pipeline tell each other the shapes of
their messages.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from xtrain.cluster import VirtualCluster, flat
from xtrain.cluster.recorder import RunTransfer
from xtrain.comm.mesh import mesh_coordinates
from xtrain.model import XtrainConfig
from xtrain.plan import Layout
from xtrain.train.layouts import axes_of, make_mesh, wrapped_model
from xtrain.train.steps import accumulate

GRADIENTS = "gradients and weights"
WHOLE = {"all_reduce": 2, "barrier": 0}
"""How often the whole tensor crosses from each rank but one to the next, if not once:
a ring's 2 (n-1)/n of each of n ranks are 2 (n-1) of the tensor."""


def two_steps(
    config: XtrainConfig, layout: Layout, sequence: int, autocast: bool
) -> None:
    model = wrapped_model(config, layout, make_mesh(layout))
    optimizer = model.optimizer(torch.optim.AdamW)
    rows = layout.micro_batch * layout.micro_batches
    tokens = torch.randint(0, config.vocab_size, (rows, sequence))
    for _ in range(2):
        torch.distributed.barrier()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            accumulate(model, tokens, tokens, micro_batches=layout.micro_batches)
        optimizer.step()
        optimizer.zero_grad()


def sent(transfer: RunTransfer) -> int:
    """By all its ranks together."""
    if transfer.kind == "message":
        return transfer.nbytes
    others = len(transfer.ranks) - 1
    return WHOLE.get(transfer.kind, 1) * others * transfer.nbytes


def axis_of(transfer: RunTransfer, layout: Layout) -> str:
    """On which its ranks differ; sums over ranks with other tokens are `GRADIENTS`."""
    sizes = axes_of(layout)
    places = [mesh_coordinates(r, tuple(sizes.values())) for r in transfer.ranks]
    numbers = zip(sizes, zip(*places, strict=True), strict=True)
    axes = "+".join(name for name, at in numbers if len(set(at)) > 1)
    others = "data" in axes or (axes, transfer.kind) == ("context", "all_reduce")
    others = others or (axes == "expert" and transfer.kind != "all_to_all")
    return GRADIENTS if others else axes


def of_last_step(transfers: list[RunTransfer]) -> Iterator[RunTransfer]:
    barriers = [n for n, one in enumerate(transfers) if one.kind == "barrier"]
    yield from (one for one in transfers[barriers[-1] :] if len(one.ranks) > 1)


def bytes_of_a_step(
    config: XtrainConfig, layout: Layout, sequence: int, autocast: bool
) -> Counter[str]:
    """What all ranks together send, by axis."""
    links = flat(latency=0.0, bandwidth=1e9)
    cluster = VirtualCluster(layout.gpus, links, record=True)
    cluster.run(two_steps, config, layout, sequence, autocast)
    record = cluster.record
    assert record is not None
    transfers = list(record.transfers)
    crossed = sum(link.bytes for link in record.links.values())
    assert crossed == pytest.approx(sum(map(sent, transfers)), rel=1e-12, abs=0)
    found: Counter[str] = Counter()
    for one in of_last_step(transfers):
        found[axis_of(one, layout)] += sent(one)
    return +found
