"""The runs behind the page on congestion, as JSON."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.cluster import VirtualCluster, now
from xtrain.cluster.topology_text import topology_of
from xtrain.comm import all_to_all_single
from xtrain.expert_parallel import Routing, dispatch, plan_dispatch

PIECE = 2**18  # bytes from each rank to each other
PICTURED = 8  # ranks
EXPERTS, TOP_K, HIDDEN = 256, 8, 7168  # of DeepSeek-V3
RANKS, TOKENS = 64, 4096  # tokens of a rank


def kept(cluster: VirtualCluster, seconds: float) -> dict[str, Any]:
    """What a figure needs of a run, as JSON."""
    record = cluster.record
    assert record is not None
    found: dict[str, Any] = {"seconds": seconds}
    found["links"] = {name: list(use) for name, use in record.links.items()}
    if cluster.size == PICTURED:
        found["messages"] = [[*m.ranks, m.start, m.end] for m in record.transfers]
    return found


# -- three orders of the same messages -------------------------------------------------


def rank_0_first(taken_NM: Tensor, given_NM: Tensor) -> None:
    """All ranks send to rank 0 first, then to rank 1, and so on."""
    one_by_one(taken_NM, given_NM, range(dist.get_world_size()))


def next_rank_first(taken_NM: Tensor, given_NM: Tensor) -> None:
    """Each rank begins with the one after it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one_by_one(taken_NM, given_NM, [(rank + step) % size for step in range(size)])


def one_by_one(taken_NM: Tensor, given_NM: Tensor, order: Iterable[int]) -> None:
    peers = [peer for peer in order if peer != dist.get_rank()]
    receives = [dist.irecv(taken_NM[peer], peer) for peer in peers]
    for peer in peers:
        dist.send(given_NM[peer], peer)
    for receive in receives:
        receive.wait()


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rank 0 first": rank_0_first, "next rank first": next_rank_first,
    "all at once": all_to_all_single, "torch": dist.all_to_all_single,
}  # fmt: skip


def exchange(way: str, nbytes: int) -> float:
    """On each rank: the virtual seconds of an all-to-all with such pieces."""
    given_NM = torch.empty(dist.get_world_size(), nbytes // 4, device="meta")
    WAYS[way](torch.empty_like(given_NM), given_NM)
    return now()


def exchanged(way: str, topology: str, ranks: int) -> dict[str, Any]:
    cluster = VirtualCluster(
        ranks, topology_of(topology, ranks), checks=False, record=True
    )
    seconds = max(cluster.run(exchange, way, PIECE))
    return kept(cluster, seconds)


# -- tokens to their experts -----------------------------------------------------------


def random_experts(seed: int, hot: float) -> Tensor:
    """The experts of a rank's tokens; expert 0 has `hot` times the others' chance."""
    random = torch.Generator().manual_seed(seed)
    chances_E = torch.ones(EXPERTS)
    chances_E[0] = hot
    return torch.multinomial(
        chances_E.expand(TOKENS, -1), TOP_K, generator=random
    )  # no expert twice


def one_dispatch(hot: float, size: int, stride: int) -> tuple[float, list[int]]:
    """On each rank: the virtual seconds of a dispatch, and its copies to each rank."""
    experts_Tk = random_experts(dist.get_rank(), hot)
    ones_Tk = torch.ones(experts_Tk.shape)
    scores_TE = torch.zeros(1, 1).expand(TOKENS, EXPERTS)
    routing = Routing(experts_Tk, ones_Tk, scores_TE, scores_TE, ones_Tk > 0)
    plan = plan_dispatch(routing, group_of(size, stride))
    x_TH = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta")
    dist.barrier()
    begun = now()
    dispatch(x_TH, plan)
    return now() - begun, plan.sent


def group_of(size: int, stride: int) -> ProcessGroup:
    """This rank's expert group: `size` ranks that are `stride` apart."""
    ranks = torch.arange(dist.get_world_size()).view(-1, size, stride)
    rows = ranks.transpose(1, 2).reshape(-1, size).tolist()
    made = [dist.new_group(row) for row in rows]  # every rank calls every one
    return next(
        group for group, row in zip(made, rows, strict=True) if dist.get_rank() in row
    )


def dispatched(topology: str, hot: float, size: int, stride: int) -> dict:
    cluster = VirtualCluster(
        RANKS, topology_of(topology, RANKS), checks=False, record=True
    )
    seconds, sent = zip(*cluster.run(one_dispatch, hot, size, stride), strict=True)
    return kept(cluster, max(seconds)) | {"sent": sent}
