"""Why the first layout wins, what limits it, and what would change it."""

from dataclasses import replace

import pytest

from xtrain.plan import (
    Accelerator,
    Assumptions,
    Layout,
    ModelShape,
    estimate,
    limits,
    what_if,
    why_first,
)

ROOM = "xtrain.plan.explain"
SHAPE = ModelShape.preset("llama-3-70b")
FIRST = Layout(tensor=4, pipeline=2, data=16, zero=1, micro_batches=16,
               sequence_parallel=True)  # fmt: skip


@pytest.mark.verifies(f"{ROOM}:why_first")
def test_the_sentence_names_what_is_saved():
    first = estimate(SHAPE, FIRST, "h100", 4096)
    wide = replace(FIRST, tensor=16, data=4, micro_batches=64)
    second = estimate(SHAPE, wide, "h100", 4096)
    said = why_first(first, second)
    assert said.startswith("TP4 PP2 DP16 ZeRO-1 beats TP16 PP2 DP4 ZeRO-1 by ")
    assert "less on collectives of tensor ranks" in said
    assert "cannot tell" in why_first(
        first, first._replace(seconds=first.seconds * 1.01)
    )
    assert "leaves less memory free" in why_first(second, first)


@pytest.mark.verifies(f"{ROOM}:limits")
def test_limits_name_memory_compute_and_a_link():
    device = Accelerator.preset("h100")
    one = estimate(SHAPE, FIRST, "h100", 4096)
    said = " ".join(limits(one, device.memory, device))
    assert "of 74.5 GiB on the" in said and "Compute takes" in said
    assert "tensor ranks take most" in said and "over nvlink4 inside a node" in said
    assert "The bubble takes" in said
    wide = replace(FIRST, tensor=16, data=4)
    across = " ".join(limits(estimate(SHAPE, wide, "h100", 64), 1.0, device))
    assert "between nodes" in across
    moe = ModelShape.preset("mixtral-8x7b")
    experts = estimate(moe, Layout(data=8, expert=8), "h100", 4096)
    assert any("over nvlink4" in line for line in limits(experts, 1.0, device))
    single = estimate(ModelShape.preset("llama-3-8b"), Layout(), "h100", 64)
    assert len(limits(single, 1.0, device)) == 2


@pytest.mark.verifies(f"{ROOM}:what_if", f"{ROOM}:Change")
def test_what_would_change():
    rows = {one.what: one for one in what_if(SHAPE, FIRST, "h100", 4096)}
    base = rows["as it is"].estimate
    assert base == estimate(SHAPE, FIRST, "h100", 4096)
    assert rows["half the network"].estimate.seconds >= base.seconds
    assert rows["fp8 products"].estimate.seconds < base.seconds
    twice = rows["twice the devices, the same batch"]
    assert twice.layout.gpus == 2 * FIRST.gpus and twice.layout.batch == FIRST.batch
    long = rows["sequences of 65536, 16 context ranks"]
    assert long.layout.gpus == FIRST.gpus and long.layout.context == 16
    old = {one.what for one in what_if(SHAPE, replace(FIRST, data=2), "a100-80gb", 64)}
    assert "fp8 products" not in old and len(old) == 4
    odd = replace(FIRST, schedule="dualpipe", micro_batches=4)
    half = what_if(SHAPE, odd, Accelerator.preset("h100"), 4096)[1]
    assert half.estimate is None and "needs micro_batches >= " in half.why
    pod = what_if(SHAPE, FIRST, "tpu-v5p", 4096, Assumptions(network=None))
    assert "half the network" not in {one.what for one in pod}
