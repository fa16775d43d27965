"""lc1: the collectives of torch.distributed, written from send and receive."""

# Its default arguments are the default group of the moment. Imported later, as by the
# first step of an optimizer, it holds that group, and destroying does not end it.
import torch.distributed.nn.functional  # noqa: F401

from xtrain.comm.all_to_all import (
    all_to_all,
    all_to_all_async,
    all_to_all_single,
    all_to_all_single_async,
    exchange_split_sizes,
)
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    barrier,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from xtrain.comm.debug_checks import debug_checks
from xtrain.comm.hierarchical import hierarchical_all_reduce
from xtrain.comm.ledger import CommLedger
from xtrain.comm.mesh import axis_ranks, init_mesh, mesh_coordinates
from xtrain.comm.message_rounds import message_rounds
from xtrain.comm.objects import (
    all_gather_object,
    broadcast_object,
    recv_object,
    send_object,
)
from xtrain.comm.one_shot import one_shot_all_reduce
from xtrain.comm.p2p import (
    exchange,
    exchange_all,
    irecv,
    isend,
    recv,
    ring_shift,
    send,
)
from xtrain.comm.parameter_server import parameter_server_all_reduce
from xtrain.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from xtrain.comm.rooted import broadcast, broadcast_naive, gather, reduce, scatter
from xtrain.comm.tree import halving_doubling_all_reduce, tree_all_reduce
from xtrain.comm.work import Work

Handle = Work  # what it was called when only all-to-all returned one

__all__ = [
    "CommLedger",
    "Handle",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_async",
    "all_to_all_single",
    "all_to_all_single_async",
    "axis_ranks",
    "barrier",
    "broadcast",
    "broadcast_naive",
    "broadcast_object",
    "debug_checks",
    "exchange",
    "exchange_all",
    "exchange_split_sizes",
    "gather",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "init_mesh",
    "irecv",
    "isend",
    "mesh_coordinates",
    "message_rounds",
    "one_shot_all_reduce",
    "parameter_server_all_reduce",
    "rank_and_size",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_shift",
    "scatter",
    "send",
    "send_object",
    "tree_all_reduce",
]
