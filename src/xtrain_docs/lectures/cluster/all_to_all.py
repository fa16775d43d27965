"""The page on congestion: all-to-alls on switches, nodes and a tree of switches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.cluster import VirtualCluster, now
from xtrain.cluster.topology_text import topology_of
from xtrain.comm import all_to_all_single
from xtrain.expert_parallel import Routing, dispatch, plan_dispatch

EXPERTS, TOP_K, HIDDEN, TOKENS = 256, 8, 7168, 4096  # of DeepSeek-V3; tokens of a rank
ROW = 2 * HIDDEN  # bytes of a copy in bf16


# -- three orders of the same messages -------------------------------------------------


def same_order(taken_NM: Tensor, given_NM: Tensor) -> None:
    """All ranks send to rank 0 first, then to rank 1, and so on."""
    in_order(taken_NM, given_NM, range(dist.get_world_size()))


def shifted(taken_NM: Tensor, given_NM: Tensor) -> None:
    """Each rank begins with the next one, and sends one message after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    in_order(taken_NM, given_NM, [(rank + step) % size for step in range(size)])


def in_order(taken_NM: Tensor, given_NM: Tensor, order: Any) -> None:
    peers = [peer for peer in order if peer != dist.get_rank()]
    receives = [dist.irecv(taken_NM[peer], peer) for peer in peers]
    for peer in peers:
        dist.send(given_NM[peer], peer)
    for receive in receives:
        receive.wait()


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "same order": same_order, "shifted": shifted, "all at once": all_to_all_single,
    "torch": dist.all_to_all_single,
}  # fmt: skip


def exchange(way: str, nbytes: int) -> float:
    """On each rank: the virtual seconds of an all-to-all with such pieces."""
    given_NM = torch.empty(dist.get_world_size(), nbytes // 4, device="meta")
    WAYS[way](torch.empty_like(given_NM), given_NM)
    return now()


def on_topology(way: str, topology: str, ranks: int, nbytes: int) -> dict[str, Any]:
    cluster = VirtualCluster(
        ranks, topology_of(topology, ranks), checks=False, record=True
    )
    cluster.run(exchange, way, nbytes)
    return kept(cluster)


def kept(cluster: VirtualCluster) -> dict[str, Any]:
    record = cluster.record
    return {
        "seconds": record.makespan,
        "links": {name: list(use) for name, use in record.links.items()},
    }


# -- tokens to their experts -----------------------------------------------------------


def experts_of(tokens: int, seed: int, hot: float) -> Tensor:
    """Each token's experts; expert 0 is chosen `hot` times as often as the others."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.ones(EXPERTS)
    weights[0] = hot
    return torch.multinomial(weights.expand(tokens, -1), TOP_K, generator=random)


def one_dispatch(stride: int, group_size: int, hot: float) -> list[float]:
    """On each rank: virtual seconds of a dispatch, and its copies."""
    rank, group = dist.get_rank(), groups(group_size, stride)
    experts_Tk = experts_of(TOKENS, rank, hot)
    ones_Tk = torch.ones(experts_Tk.shape)
    zeros_TE = torch.zeros(1, 1).expand(TOKENS, EXPERTS)
    routing = Routing(experts_Tk, ones_Tk, zeros_TE, zeros_TE, ones_Tk > 0)
    plan = plan_dispatch(routing, group)
    dist.barrier()
    begun = now()
    dispatch(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta"), plan)
    return [now() - begun]


def groups(size: int, stride: int) -> ProcessGroup:
    """This rank's group: ranks that are `stride` apart."""
    world = torch.arange(dist.get_world_size())
    table = world.view(-1, size, stride).transpose(1, 2).reshape(-1, size)
    mine = None
    for row in table.tolist():
        group = dist.new_group(row)
        mine = group if dist.get_rank() in row else mine
    return mine


def dispatched(
    topology: str, ranks: int, group_size: int, stride: int, hot: float
) -> dict[str, Any]:
    cluster = VirtualCluster(
        ranks, topology_of(topology, ranks), checks=False, record=True
    )
    seconds = cluster.run(one_dispatch, stride, group_size, hot)
    return {**kept(cluster), "seconds": max(s for s, in seconds)}
