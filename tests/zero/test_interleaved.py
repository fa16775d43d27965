"""Several forwards before their backwards: outputs, gradients and steps of one process.

A pipeline runs F0 F1 B0 F2 B1 B2: forwards and backwards of micro-batches interleaved.
Every wrapper must give what one process gives, reduced after every backward, in the
last one, or by `reduce_gradients`.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.training import Model, batch_of, flat_groups, pieces_of
from xtrain.data_parallel import DistributedDataParallel
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

ORDERS = [
    "F0 F1 B0 B1",
    "F0 F1 B1 B0",
    "F0 F1 F2 B0 B1 B2",
    "F0 B0 F1 F2 B1 B2",  # mixed with one forward, one backward
    "F0 F1 B0 F2 B1 B2",  # the steady state of a pipeline
]
TINY = 2**-10  # MiB: every bucket holds a parameter or two


class Net(Model):
    """Tied weights, odd sizes, a block that is frozen; on request computed twice."""

    def __init__(self, seed, recompute=False, frozen=False):
        super().__init__(seed)
        self.recompute = recompute
        self.layers[1].requires_grad_(not frozen)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            if self.recompute:
                hidden = checkpoint(layer, hidden, positions, use_reentrant=False)
            else:
                hidden = layer(hidden, positions)
        if self.recompute:  # the root's weights are needed again in backward
            return checkpoint(self.last, hidden, use_reentrant=False)
        return self.last(hidden)

    def last(self, hidden):
        return self.lm_head(self.norm(hidden)) * self.scale


def make_net(seed, **options):
    return Net(seed, **options).double()


class Wrapped:
    """One wrapper with its optimizer; how its gradients are found."""

    def __init__(self, kind, net, make_optimizer, **options):
        self.kind, self.bare = kind, net
        self.model = net
        self.optimizer = None
        if kind in ("zero 1", "zero 2"):
            self.optimizer = self.reducer = ZeroOptimizer(
                net.parameters(), **make_optimizer, stage=int(kind[-1]),
                bucket_cap_mb=TINY, **options,
            )  # fmt: skip
        elif kind == "ddp":
            self.model = DistributedDataParallel(net, bucket_cap_mb=TINY, **options)
            self.reducer = self.model
        else:
            self.model = FullyShardedDataParallel(net, **options)
            self.reducer = self.model
        if self.optimizer is None:
            make = dict(make_optimizer)
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = make.pop("optimizer_class")(trainable, **make)

    def parts(self):
        """(name, first element, gradient) of what this rank has of each parameter."""
        names = {p: name for name, p in self.bare.named_parameters()}
        rank = dist.get_rank()
        if self.kind == "ddp":
            yield from ((n, 0, p.grad) for p, n in names.items() if p.requires_grad)
        elif self.kind == "fsdp":
            for name, local, bounds in pieces_of(self.model):
                if local.requires_grad:
                    yield name, bounds.start, local.grad
        else:
            for bucket in self.optimizer.buckets:
                pieces = bucket.layout.pieces(bucket.master.grad, rank)
                for p, piece, slot in zip(
                    bucket.parameters, pieces, bucket.layout.slots, strict=True
                ):
                    yield names[p], bucket.layout.piece_bounds(slot, rank)[0], piece

    def weights(self):
        if self.kind == "fsdp":
            return self.model.full_state_dict()
        return dict(self.bare.state_dict())


def run_order(wrapped, order, step, reduced):
    """Forwards and backwards in this order; the outputs, by micro-batch."""
    rank, outputs = dist.get_rank(), {}
    actions = order.split()
    inside = {"every": 0, "last": len(actions) - 1, "at the end": len(actions)}[reduced]
    context = wrapped.reducer.no_sync() if inside else contextlib.nullcontext()
    with context:
        run_actions(wrapped, actions[:inside], step, rank, outputs)
        if step == 0 and reduced == "at the end":  # inside or outside: both are right
            wrapped.reducer.reduce_gradients()
    run_actions(wrapped, actions[inside:], step, rank, outputs)
    wrapped.reducer.reduce_gradients()  # does nothing where it is done
    return outputs


def run_actions(wrapped, actions, step, rank, outputs):
    for action in actions:
        micro = int(action[1])
        if action[0] == "F":
            outputs[micro] = wrapped.model(batch_of(step, micro, rank))
        else:
            outputs[micro].square().sum().backward()


def compare(
    kind,
    reduced,
    net_options=None,
    options=None,
    tolerance=1e-12,
    orders=ORDERS,
    run=run_order,
):
    """A step of each order, against a copy of the model that does all ranks' work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    make = {"optimizer_class": torch.optim.AdamW, "lr": 0.02, "weight_decay": 0.1}
    if tolerance > 1e-12:  # AdamW makes much of small differences
        make = {"optimizer_class": torch.optim.SGD, "lr": 1e-4}
    net = make_net(100 + rank if rank else 0, **(net_options or {}))
    reference = make_net(0, **(net_options or {}))
    net.scale.copy_(reference.scale)
    wrapped = Wrapped(kind, net, make, **(options or {}))
    kept = {"optimizer_class"}
    optimizer = make["optimizer_class"](
        [p for p in reference.parameters() if p.requires_grad],
        **{key: value for key, value in make.items() if key not in kept},
    )
    close = {"rtol": tolerance, "atol": tolerance}
    for step, order in enumerate(orders):
        outputs = run(wrapped, order, step, reduced)
        for micro in sorted(outputs):
            for other in range(size):
                output = reference(batch_of(step, micro, other))
                (output.square().sum() / size).backward()
                if other == rank:
                    found = outputs[micro].to(output.dtype)
                    torch.testing.assert_close(found, output, **close)
        expected = {n: p.grad.flatten() for n, p in reference.named_parameters()
                    if p.grad is not None}  # fmt: skip
        seen = set()
        for name, first, gradient in wrapped.parts():
            gradient, seen = gradient.flatten(), seen | {name}
            whole = expected[name][first : first + len(gradient)]
            torch.testing.assert_close(gradient, whole, **close)
        assert seen == set(expected)
        wrapped.optimizer.step()
        optimizer.step()
        wrapped.optimizer.zero_grad()
        optimizer.zero_grad()
        assert not left_whole(wrapped)
    weights = wrapped.weights()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, **close)


def left_whole(wrapped):
    """Units of which a rank still has whole weights or whole gradients."""
    return [
        group.names
        for group in (flat_groups(wrapped.model) if wrapped.kind == "fsdp" else [])
        if group.full.untyped_storage().nbytes() or group.full_grad is not None
    ]


REDUCED = ["every", "last", "at the end"]
CASES = [
    *[(kind, reduced, {}, {}) for kind in ("ddp", "zero 1", "zero 2", "fsdp")
      for reduced in REDUCED],
    *[("fsdp", reduced, {"frozen": True}, {"reshard_after_forward": False})
      for reduced in REDUCED],
    *[("fsdp", reduced, {"recompute": True, "frozen": True}, {})
      for reduced in REDUCED],
    ("fsdp", "every", {"recompute": True}, {"reshard_after_forward": False}),
    ("fsdp", "at the end", {"recompute": True}, {"reshard_after_forward": False}),
    ("ddp", "at the end", {"recompute": True, "frozen": True}, {}),
    ("zero 2", "last", {"recompute": True, "frozen": True}, {}),
]  # fmt: skip
IN_FLOAT32 = [
    ("fsdp", "every", {}, {"compute_dtype": torch.float32}),
    ("fsdp", "at the end", {"recompute": True}, {"compute_dtype": torch.float32}),
]


def compare_all(cases, in_float32):
    for case in cases:
        compare(*case)
    for case in in_float32:
        compare(*case, tolerance=1e-4)


@pytest.mark.verifies(
    "xtrain.comm.backward:Reducer",
    "xtrain.data_parallel.ddp:DistributedDataParallel",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.stage1:ReduceAtStep",
    "xtrain.zero.stage2:ReduceInBackward",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
    "xtrain.zero.fsdp_schedule:UnitSchedule",
    "xtrain.zero.flat_param_group:FlatParamGroup",
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_micro_batches_may_overlap_in_any_order(world, size):
    """All cases on 2 ranks, on the other sizes a part of them each."""
    part = slice(None) if size == 2 else slice(size % 4, None, 4)
    in_float32 = IN_FLOAT32 if size == 3 else []
    world(size).run(compare_all, CASES[part], in_float32, timeout=300)
