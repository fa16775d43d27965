"""What wrappers refuse when they are built, by name and on every rank.

One rank's mistake is in the message of all ranks, so that none waits or trains on.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.collective_choice import DIRECT, RING
from xtrain.comm.wrapper_rules import claim
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.testing import expect_error
from xtrain.zero import (
    Adam,
    AdamW,
    FullyShardedDataParallel,
    LossScaler,
    ZeroOptimizer,
    clip_sharded_grad_norm_,
)

NAN, INF = float("nan"), float("inf")


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def zero(model=None, optimizer_class=AdamW, **options):
    return ZeroOptimizer((model or net()).parameters(), optimizer_class, **options)


def frozen(model):
    return model.requires_grad_(False)


def ddp(model=None, **options):
    return DistributedDataParallel(model or net(), **options)


def naive(model=None, **options):
    return NaiveDataParallel(model or net(), **options)


def fsdp(model=None, **options):
    return FullyShardedDataParallel(model or net(), **options)


def other(option, mine, theirs):
    """The message about rank 1's value."""
    return f"ranks 0 and 1 have different {option}: {option} is {mine} and {theirs}"


def on_meta():
    with torch.device("meta"):
        return net()


def with_a_table_on_meta():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
        module.register_buffer("table", torch.zeros(2), persistent=False)
    return module


def after(wrap):
    model = net()
    wrap(model)
    return model


def cases(odd):
    """(call, what it must say); in the first part only rank 1 is odd."""
    half = net().double() if odd else net()
    one = "sum" if odd else "average"
    reduction = other("gradient_reduction", "'average'", "'sum'")
    yield lambda: zero(gradient_reduction=one), reduction
    yield lambda: ddp(gradient_reduction=one), reduction
    yield lambda: naive(gradient_reduction=one), reduction
    yield lambda: fsdp(gradient_reduction=one), reduction
    yield lambda: zero(lr=0.1 + odd), other("lr", "0.1", "1.1")
    yield lambda: zero(stage=1 + odd), other("stage", "1", "2")
    yield lambda: zero(offload=odd), other("offload", "False", "True")
    yield lambda: zero(master_weights=odd), other("master_weights", "False", "True")
    yield lambda: zero(bucket_cap_mb=1 + odd), other("bucket_cap_mb", "1", "2")
    yield lambda: zero(None, Adam if odd else AdamW), "optimizer_class is AdamW and Ada"
    choice = DIRECT if odd else RING
    yield lambda: zero(collectives=choice), other("collectives", "'ring'", "'direct'")
    yield lambda: ddp(collectives=choice), other("collectives", "'ring'", "'direct'")
    yield lambda: fsdp(collectives=choice), other("collectives", "'ring'", "'direct'")
    group = {"params": net().parameters(), "lr": 0.5 + odd}
    yield (
        lambda: ZeroOptimizer([group], AdamW),
        other("lr of group 0", "0.5", "1.5"),
    )
    yield lambda: ddp(bucket_cap_mb=1 + odd), other("bucket_cap_mb", "1", "2")
    yield (
        lambda: ddp(broadcast_buffers=odd),
        other("broadcast_buffers", "False", "True"),
    )
    yield (
        lambda: ddp(find_unused_parameters=odd),
        other("find_unused_parameters", "False", "True"),
    )
    yield (
        lambda: fsdp(reshard_after_forward=odd),
        other("reshard_after_forward", "False", "True"),
    )
    low = torch.bfloat16 if odd else torch.float16
    yield (
        lambda: fsdp(compute_dtype=low),
        other("compute_dtype", "torch.float16", "torch.bfloat16"),
    )
    yield lambda: fsdp(blocks=["0"] if odd else ["1"]), "blocks is [\"'1'\"] and [\"'0'"
    wide = nn.Linear(2, 2 + odd)
    for wrap in (zero, fsdp):
        yield lambda w=wrap: w(wide), "ranks 0 and 1 have different parameters"
    for wrap in (naive, ddp):
        yield lambda w=wrap: w(wide), "ranks 0 and 1 have different models"
    # What is wrong with the arguments on rank 1 alone.
    yield lambda: ddp(frozen(net()) if odd else net()), "rank 1: the module has no para"
    yield lambda: zero(frozen(net()) if odd else net()), "rank 1: no parameter requires"
    yield lambda: fsdp(frozen(net()) if odd else net()), "[3, 2] float32 trained and [3"
    yield lambda: zero(stage=3 if odd else 2), "rank 1: stage=3"
    yield lambda: ddp(gradient_reduction="mean" if odd else "sum"), "rank 1: gradient_r"
    yield lambda: fsdp(blocks=["x"] if odd else None), "rank 1: blocks ['x']: no such"
    yield lambda: ddp(on_meta() if odd else net()), "rank 1: 0.weight is on the meta de"
    yield lambda: ddp(half), "0.weight is [3, 2] float32 trained and [3, 2] float64 t"
    yield lambda: naive(half), "[3, 2] float32 trained and [3, 2] float64 trained"
    yield (
        lambda: fsdp(half),
        "0.weight is [3, 2] float32 trained and [3, 2] float64 t",
    )
    yield lambda: zero(half), "parameter 0 is [3, 2] float32 trained and [3, 2] float64"
    yield lambda: clip_sharded_grad_norm_([], 1.0 + odd), "by rank: [1.0, 2.0, 1.0]"
    # The same on all ranks.
    for wrap in (zero, fsdp, ddp, naive):
        yield lambda w=wrap: w(gradient_reduction="mean"), "'mean' is neither"
    yield lambda: zero(stage=3), "stage=3"
    yield lambda: ZeroOptimizer([], AdamW), "no parameters"
    yield lambda: zero(frozen(net())), "no parameter requires"
    shared = list(net().parameters())
    groups = [{"params": shared}, {"params": shared[0]}]
    yield lambda: ZeroOptimizer(groups, AdamW), "twice"
    yield lambda: zero().save_sharded("/nowhere", 0, nn.Linear(2, 2)), "not of module"
    yield lambda: fsdp(blocks=["0", "9"]), "blocks ['9']: no such modules"
    yield lambda: fsdp(with_a_table_on_meta()), "table is on the meta device"
    for wrap in (ddp, zero):
        for cap in (0, -1, NAN, INF, "25", None, True):
            yield lambda w=wrap, c=cap: w(bucket_cap_mb=c), f"bucket_cap_mb={cap!r} mus"
    yield (
        lambda: fsdp(compute_dtype=torch.int32),
        "compute_dtype=torch.int32 is not a f",
    )
    for wrap in (ddp, naive, zero):
        yield lambda w=wrap: w(on_meta()), "is on the meta device"
    for wrap in (ddp, zero):
        yield lambda w=wrap: w(device="cpu"), "device='cpu' is not \"meta\""
    for limit in (-1.0, NAN):
        yield lambda m=limit: clip_sharded_grad_norm_([], m), "not negative"
    # Two wrappers around one module.
    yield (
        lambda: ddp(ddp()),
        "ddp.DistributedDataParallel reduces the gradients of",
    )
    yield lambda: ddp(naive()), "naive.NaiveDataParallel reduces the gradients"
    yield lambda: fsdp(ddp()), "ddp.DistributedDataParallel reduces the gradients"
    yield lambda: ddp(fsdp()), "fsdp.FullyShardedDataParallel reduces the gradients"
    yield lambda: fsdp(fsdp()), "fsdp.FullyShardedDataParallel reduces the gradients"
    torchs = nn.parallel.DistributedDataParallel
    yield lambda: ddp(torchs(net())), "torch.nn.parallel.distributed.DistributedDataPar"
    yield lambda: fsdp(torchs(net())), "torch.nn.parallel.distributed.DistributedDataPa"
    yield lambda: ddp(nn.Sequential(ddp())), "DistributedDataParallel reduces"
    yield lambda: ddp(after(ddp)), "DistributedDataParallel reduces the gradients of th"
    for stage in (1, 2):
        yield (
            lambda s=stage: ddp(after(lambda m: zero(m, stage=s))),
            "ZeroOptimizer reduces the gradients of these parameters already, and D",
        )
        yield (
            lambda s=stage: zero(after(lambda m: zero(m, stage=s))),
            "ZeroOptimizer reduces the gradients of these parameters already, and Z",
        )
    yield lambda: zero(fsdp()), "FullyShardedDataParallel reduces the gradients of the"
    yield lambda: zero(ddp()), "DistributedDataParallel reduces the gradients of these"
    yield (
        lambda: ZeroOptimizer(torch.ones(3), AdamW),
        "params is one tensor: put it in",
    )


def what_is_said():
    said = []
    for call, expected in cases(dist.get_rank() == 1):
        try:
            call()
            said.append((expected, "accepted"))
        except ValueError as error:
            said.append((expected, str(error)))
    return said


@pytest.mark.verifies(
    "xtrain.comm.agreement:check_same", "xtrain.data_parallel.replicas:check_model"
)
def test_bad_arguments_are_named_on_every_rank(world):
    """Every case on three ranks: one that raised alone would end in a timeout."""
    results = world(3).run(what_is_said)
    for said in zip(*results, strict=True):
        for expected, message in said:
            assert expected in message, (expected, message)
        assert len({message for _, message in said}) == 1, said


def after_a_refusal():
    """Options that the inner optimizer refuses leave the module free for another."""
    model = net()
    with pytest.raises(ValueError, match="lr=-1"):
        zero(model, stage=2, lr=-1)
    zero(model, stage=2)


def test_a_refused_optimizer_holds_nothing(world):
    world(2).run(after_a_refusal)


def late_and_odd(what):
    optimizer = zero()
    odd = dist.get_rank() == 1
    extra = nn.Linear(2, 2 + (odd and what == "shape"))
    if odd and what == "owned":
        claim([extra.weight], "DistributedDataParallel")
    group = {"params": extra.parameters(), "lr": 0.1 + (odd and what == "lr")}
    optimizer.add_param_group(group)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("shape", r"parameter 0 is \[2, 2\] float32 trained and \[3, 2\]"),
        ("lr", "lr of group 0 is 0.1 and 1.1"),
        ("owned", "rank 1: DistributedDataParallel reduces"),
    ],
)
def test_parameters_that_come_later_must_agree_too(world, what, match):
    expect_error(world(3), late_and_odd, what, match=match)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": INF},
        {"lr": NAN},
        {"eps": INF},
        {"weight_decay": INF},
        {"betas": (NAN, 0.9)},
    ],
)
def test_adam_refuses_what_is_not_finite(options):
    (value,) = options.values()
    for optimizer_class in (Adam, AdamW):
        with pytest.raises(ValueError, match=re.escape(f"={value}")):
            optimizer_class([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": NAN},
        {"init_scale": INF},
        {"growth_factor": NAN},
        {"growth_factor": INF},
        {"backoff_factor": NAN},
        {"growth_interval": 0},
    ],
)
def test_a_scaler_refuses_what_is_not_finite(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LossScaler(**options)


def test_the_same_defaults_print_alike():
    """Compared by what they print as: no address of a function may tell ranks apart."""
    from xtrain.comm.agreement import as_text

    assert as_text(lambda: 0) == "test_the_same_defaults_print_alike.<locals>.<lambda>"
    assert as_text(torch.tensor([1.0, 2.0])) == "[1.0, 2.0]"
    assert as_text(object()) == "<object object>"
    assert as_text(AdamW) == "AdamW"
    assert as_text((0.9, None)) == "(0.9, None)"
