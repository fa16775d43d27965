# mypy: disable-error-code="override,assignment,call-arg,misc"
"""A torch.distributed backend in Python: torch's calls in, steps of a transport out.

torch hands every call of a group to methods of its `ProcessGroup`. A subclass written
in Python can be registered as a backend, and DDP, FSDP2, DTensor and pipelining run on
it unchanged. This one makes sure that all ranks are in the same call, has the transport
run it, and returns a `Work` to wait for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.backends.group import Group
from xtrain.backends.observers import unobserved
from xtrain.backends.operators import as_operator
from xtrain.backends.point_to_point import post_receive, post_send
from xtrain.backends.shared_tensors import make_shared
from xtrain.backends.torch_calls import TorchCalls


class XtrainProcessGroup(TorchCalls, Group):
    """One group of ranks over one transport.

    Errors are RuntimeErrors: a peer that died or left is named together with the call
    that waited for it; ranks in different calls see all ranks' calls.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._collective = self._runner.collective  # looked up once, not in each call

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        return post_send(self._runner, tensor, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        self._runner.check_peer("recv", src)
        (tensor,) = tensors
        return post_receive(self._runner, tensor, (src,), tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        (tensor,) = tensors
        return post_receive(self._runner, tensor, tuple(self._transport.others), tag)

    @unobserved()
    def shared_empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `xtrain.backends.shared_empty`."""
        return make_shared(self._runner, shape, dtype)


for _name in ("send", "recv", "recv_anysource"):
    _method = getattr(XtrainProcessGroup, _name)
    setattr(XtrainProcessGroup, _name, as_operator(_name, _method))
