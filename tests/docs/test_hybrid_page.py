"""The page on hybrid sharding: what its runs on a virtual cluster show."""

import pytest

from xtrain_docs.lectures.lc3 import hybrid


@pytest.mark.verifies(
    "xtrain.zero.hybrid:Replicas", "xtrain.zero.fsdp:FullyShardedDataParallel"
)
def test_only_sums_of_the_last_micro_batch_leave_a_node():
    """Two micro-batches of four layers: what the picture says of its lanes."""
    layers = hybrid.LAYERS
    plain, shared = (hybrid.step_on_nodes(h, hybrid.SLOW, 2) for h in (False, True))
    for step, kind in ((plain, False), (shared, True)):
        assert step["sent"] == pytest.approx(hybrid.hybrid_sent(kind, 2), rel=1e-3)
    lanes = {
        (name, lane): [bar for bar in step["bars"] if bar[0] == lane]
        for name, step in (("FSDP", plain), ("hybrid", shared))
        for lane in hybrid.LANES
    }
    assert lanes["FSDP", "in the node"] == []
    assert len(lanes["FSDP", "to other nodes"]) == 2 * 3 * layers
    assert len(lanes["hybrid", "in the node"]) == 2 * 3 * layers
    sums = lanes["hybrid", "to other nodes"]
    assert len(sums) == layers
    gathers = lanes["hybrid", "in the node"][: 3 * layers]
    assert sums[0][1] > gathers[-1][2], "after the first micro-batch"
    waiting = sum(end - begin for _, begin, end in lanes["FSDP", "to other nodes"])
    assert waiting > 0.9 * plain["seconds"], "the network is never idle"
    assert shared["seconds"] < 0.7 * plain["seconds"]
