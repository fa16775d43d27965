"""The search: complete, legal, in order, and it says why not."""

from dataclasses import replace

import pytest

from xtrain.plan import (
    Assumptions,
    Layout,
    ModelShape,
    SearchSpace,
    broken_rules,
    estimate,
    search,
)
from xtrain.plan.search import MEMORY, candidates, check_count, divisors

SEARCH = "xtrain.plan.search:search"
SPACE = "xtrain.plan.search:SearchSpace"
LLAMA = ModelShape.preset("llama-3-70b")
GIB = 2**30


@pytest.mark.verifies(SEARCH)
def test_every_layout_is_ranked_or_rejected():
    result = search(LLAMA, "a100-80gb", 64, 8192, 512)
    rejected = sum(one.count for one in result.rejected)
    assert result.tried == len(result.found) + rejected
    memory = [one for one in result.rejected if one.rule == MEMORY]
    assert result.estimated == len(result.found) + memory[0].count
    order = [(one.verdict != "fits", one.seconds) for one in result.found]
    assert order == sorted(order) and result.best is result.found[0]
    assert {one.verdict for one in result.found} <= {"fits", "tight"}
    for one in result.found[::25]:
        assert one.layout.gpus == 64 and one.layout.batch == 512
        assert broken_rules(LLAMA, one.layout, 8192, gpus=64, batch=512) == []
        assert one == estimate(LLAMA, one.layout, "a100-80gb", 8192)
    shapes = {(one.layout.tensor, one.layout.pipeline) for one in result.found}
    assert (8, 2) in shapes


@pytest.mark.verifies(SEARCH)
def test_the_example_needs_a_sharded_optimizer():
    """TP8 PP2 DP4: never with ZeRO-0, and with ZeRO-1 without recomputation."""
    space = SearchSpace(tensor=(8,), pipeline=(2,), context=(1,), micro_batch=(1,))
    assumed = Assumptions(capacity=79.2 * GIB)
    for batch, sequence in ((512, 8192), (1024, 4096)):
        result = search(
            LLAMA, "a100-80gb", 64, sequence, batch, space=space, assumptions=assumed
        )
        fits = [one.layout for one in result.found if one.verdict == "fits"]
        assert {layout.zero for layout in fits if layout.recompute == "none"} == {1}
    why = [one for one in result.rejected if one.rule == MEMORY]
    assert "GiB on the first rank, and a device has 79.2" in why[0].why


@pytest.mark.verifies("xtrain.plan.search:candidates")
def test_candidates_are_all_ways_to_write_the_devices():
    space = SearchSpace(zero=(1,), recompute=("none",), micro_batch=(1,),
                        schedules=(("one_f_one_b", 1),))  # fmt: skip
    found = list(candidates(LLAMA, 12, 144, space))
    axes = {(one.tensor, one.pipeline, one.context, one.data) for one in found}
    assert len(axes) == len(found)
    expected = {
        (t, p, c, 12 // (t * p * c))
        for t in divisors(12)
        for p in divisors(12)
        for c in divisors(12)
        if 12 % (t * p * c) == 0 and t * p < 12  # ZeRO-1 of one rank is ZeRO-0
    }
    assert axes == expected
    assert all(one.sequence_parallel is (one.tensor > 1) for one in found)
    assert all(one.shard_context is (one.context > 1) for one in found)
    experts = list(candidates(ModelShape.preset("mixtral-8x7b"), 4, 8, space))
    assert {one.expert for one in experts if one.data == 4} == {1, 2, 4}
    whole = {one.expert for one in experts if one.expert_tensor == 1}
    assert whole == {2, 4}  # of tensor ranks, where data has too few
    copies = replace(space, zero=(3,), replicate=(1, 2))
    shards = {
        one.shard_ranks for one in candidates(LLAMA, 4, 8, copies) if one.data == 4
    }
    assert shards == {4, 2}
    fixed = candidates(LLAMA, 4, 8, space, context_way="ulysses")
    assert {one.context_way for one in fixed} == {"ulysses"}


@pytest.mark.verifies(SEARCH)
def test_what_is_tight_stands_behind_what_fits():
    space = SearchSpace(tensor=(8,), pipeline=(2,), context=(1,), zero=(1,),
                        micro_batch=(1,), schedules=(("one_f_one_b", 1),),
                        recompute=("none", "full"))  # fmt: skip
    assumed = Assumptions(capacity=62 * GIB, reserve=8 * GIB)
    found = search(
        LLAMA, "a100-80gb", 64, 8192, 512, space=space, assumptions=assumed
    ).found
    said = [one.verdict for one in found]
    assert said == ["fits", "tight"] and found[1].seconds < found[0].seconds


@pytest.mark.verifies(SEARCH)
def test_a_device_that_is_too_small_and_a_batch_that_does_not_divide():
    result = search(LLAMA, "v100", 2, 4096, 2)
    assert result.best is None and result.rejected
    with pytest.raises(ValueError, match="batch=3 sequences cannot be divided"):
        search(LLAMA, "h100", 8, 4096, 3, space=SearchSpace(tensor=(1,), pipeline=(1,),
                                                            context=(1,)))  # fmt: skip
    for name in ("gpus", "sequence", "batch"):
        sizes = {"gpus": 8, "sequence": 64, "batch": 8, name: 0}
        with pytest.raises(ValueError, match=f"{name}=0"):
            search(LLAMA, "h100", **sizes)


@pytest.mark.verifies(SPACE)
@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"zero": (4,)}, "zero=4 is not one of"),
        ({"recompute": ("some",)}, "recompute='some'"),
        ({"schedules": (("1f1b", 1),)}, "schedules='1f1b'"),
        ({"tensor": (0,)}, "tensor=0"),
    ],
)
def test_a_space_of_what_there_is_not(chosen, said):
    with pytest.raises(ValueError, match=said):
        SearchSpace(**chosen)


@pytest.mark.verifies(SEARCH)
def test_more_of_everything_is_never_slower_than_its_parts():
    """A larger space has the smaller one's best."""
    small = SearchSpace(zero=(0, 1), recompute=("full",))
    large = replace(small, recompute=("none", "full"))
    best = [
        search(LLAMA, "h200", 64, 4096, 256, space=space).best
        for space in (small, large)
    ]
    assert best[0] and best[1] and best[1].seconds <= best[0].seconds
    assert isinstance(best[1].layout, Layout)


@pytest.mark.verifies("xtrain.plan.search:check_count")
def test_experts_on_a_thousand_devices_are_searched_and_on_two_thousand_not():
    shape = ModelShape.preset("mixtral-8x7b")
    check_count(shape, 1024, SearchSpace())
    check_count(shape, 2048, SearchSpace(expert=(8,)))
    with pytest.raises(ValueError, match="gpus=2048 have more than 300000 layouts"):
        check_count(shape, 2048, SearchSpace())
