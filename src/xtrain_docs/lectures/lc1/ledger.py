"""What our collectives and gloo's own send: the ledger's count and the kernel's."""

import time

import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER
from xtrain.comm.collective_kinds import kind_of, prepare

from ... import runs
from ...amounts import bytes_
from ...figures import REGISTRY
from ...svg import Axis, bar_chart

PAIRS = {
    "all-reduce": (comm.ring_all_reduce, dist.all_reduce),
    "reduce-scatter": (comm.ring_reduce_scatter, REDUCE_SCATTER),
    "all-gather": (comm.ring_all_gather, ALL_GATHER),
    "all-to-all": (comm.all_to_all_single, dist.all_to_all_single),
    "broadcast": (comm.broadcast, dist.broadcast),
    "reduce": (comm.reduce, dist.reduce),
}


def sent(name: str, theirs: bool, size: int) -> dict[str, int | None]:
    """Payload and wire bytes of one call, connections warm; wire is None off Linux."""
    whole = torch.full((size // 4,), float(dist.get_rank()))
    run = prepare(kind_of(name.replace("-", "_")), PAIRS[name][theirs], whole).run
    run()
    dist.barrier()
    time.sleep(0.05)  # let the last bytes of the barrier leave
    with comm.CommLedger() as ledger:
        run()
        time.sleep(0.05)  # gloo's thread may still be sending for this rank
    return {"payload": ledger.bytes_sent, "wire": ledger.wire_bytes}


@REGISTRY
def wire_bars(ranks: int = 4, size: int = 3 * 2**19) -> str:
    """Ours and gloo's own: what an average rank's sockets sent, in full tensors."""
    bars: dict[str, dict[str, float]] = {}
    for name in PAIRS:
        ours, theirs = (
            runs.remembered(sent, ranks, name, whose, size) for whose in (False, True)
        )
        counted = {
            "ours, payload": [one["payload"] for one in ours],
            "ours, on the wire": [one["wire"] for one in ours],
            "gloo's own, on the wire": [one["wire"] for one in theirs],
        }
        bars[name] = {
            whose: sum(numbers) / ranks / size
            for whose, numbers in counted.items()
            if None not in numbers  # only Linux counts what is on the wire
        }
    return bar_chart(
        bars,
        Axis("bytes sent by an average rank (M: the tensor)", format="{:.2f} M".format),
        f"Bytes of one call on {ranks} ranks",
        f"A tensor of {bytes_(size)}; averages over the ranks.",
    )
