"""Send and receive at the same time: the step from which every collective is made.

Computes:   `recv` becomes what rank `src` sends here, while `send` goes to rank `dst`.
Sends:      one tensor. Ranks are global ones, as everywhere in torch.
Leaves out: strided tensors, ranks inside the group (`group_dst`), checks.
"""

import torch.distributed as dist
from torch import Tensor


def exchange(
    send: Tensor,
    dst: int,
    recv: Tensor,
    src: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send one tensor while another one arrives; returns when both are done."""
    if dst == dist.get_rank():  # a message needs two ranks
        recv.detach().copy_(send)
        return
    # Both are posted before either is waited for. With a blocking send first, two ranks
    # that exchange would each wait for a receive that the other has not come to.
    calls = [
        dist.P2POp(dist.isend, send.detach(), dst, group),
        dist.P2POp(dist.irecv, recv.detach(), src, group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
