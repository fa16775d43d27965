"""Trials of a backend: torch's own functions, in a group on that backend.

Every contestant makes the same call, such as `dist.all_reduce(tensor, group=group)`;
only the group's backend differs. All groups stand side by side in the same processes,
so the sides take turns from sample to sample.

`size` is the whole tensor in bytes; for the training step it is the gradients of all
layers together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from xtrain import backends
from xtrain.bench.collective_trials import ITEM, pattern, total, trial
from xtrain.bench.race import Case, Contestant, Trial
from xtrain.bench.training_trials import group_on

LAYERS, BATCH = 4, 4  # of the training step: much to send, little to compute
BACKENDS = ("gloo", "xtrain-shm", "xtrain-socket")
SHM, SOCKET = BACKENDS[1:]


def on(kind: str, function: Callable[..., object], backend: str, case: Case) -> Trial:
    """A collective whose function runs in a group on `backend`."""
    return trial(kind, partial(function, group=group_on(backend)), case)


def sides(make: Callable[..., Trial], *given: Any) -> tuple[Contestant, ...]:
    """The same trial on gloo, on shared memory and on sockets."""
    return tuple(Contestant(name, partial(make, *given, name)) for name in BACKENDS)


# ------------------------------------------------------ tensors in shared memory


def shared_trial(case: Case) -> Trial:
    """An all-reduce of a tensor that lives in shared memory."""
    group = group_on(SHM)
    tensor = backends.shared_empty(case.size // ITEM, dtype=torch.float32, group=group)
    tensor.copy_(pattern(case, dist.get_rank() + 1))
    return Trial(partial(dist.all_reduce, tensor, group=group), [tensor], tensor.zero_)


def copy_trial(case: Case) -> Trial:
    """Every rank reads a tensor once and writes one: no all-reduce can do with less."""
    source = total(case)
    copy = torch.zeros_like(source)
    return Trial(partial(copy.copy_, source), [copy])


# -------------------------------------------------------------- point-to-point


def ping_pong_trial(backend: str, case: Case) -> Trial:
    """Ranks 0 and 1, 2 and 3, ...: a message there and one back."""
    rank, group = dist.get_rank(), group_on(backend)
    mine = pattern(case, rank + 1)
    received = torch.empty_like(mine)
    send = partial(dist.send, mine, rank ^ 1, group=group)
    receive = partial(dist.recv, received, rank ^ 1, group=group)

    def there_and_back() -> None:
        for step in (send, receive) if rank % 2 == 0 else (receive, send):
            step()

    return Trial(there_and_back, [received])


def ping_pong_reference(case: Case) -> list[Tensor]:
    """What the partner sent."""
    return [pattern(case, (dist.get_rank() ^ 1) + 1)]


# --------------------------------------------------------------- training step


class Layers(nn.Module):
    """Square linear layers whose weights take `nbytes` together."""

    def __init__(self, nbytes: int):
        super().__init__()
        self.width = int((nbytes / LAYERS / ITEM) ** 0.5)
        self.layers = nn.ModuleList(
            nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def ddp_trial(backend: str, case: Case) -> Trial:
    """One step of torch's DDP with plain SGD; the weights must come out equal."""
    torch.manual_seed(0)
    model = Layers(case.size).to(case.device)
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(2, BATCH, model.width, device=case.device).unbind()
    group = group_on(backend)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()

    return Trial(step, [weight.detach() for weight in model.parameters()])
