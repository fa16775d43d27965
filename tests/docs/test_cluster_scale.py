"""The page on scale: its records come out again, and have the bytes of the plan."""

from collections import Counter

import pytest

from xtrain.bench import cluster_scale, cluster_shapes
from xtrain.plan import Layout, traffic_per_step
from xtrain_docs.lectures.cluster import scale as page
from xtrain_docs.lectures.cluster.clock import recorded

SHAPES = {row["program"]: row for row in recorded("shapes.json")["rows"]}
VIRTUAL = "virtual_seconds", "most_memory", "least_memory", "sent"


def test_all_programs_are_recorded():
    assert list(SHAPES) == list(cluster_shapes.PROGRAMS)
    found = Counter(row["ranks"] for row in page.scale_rows())
    most = [ranks for _, ranks in cluster_scale.PROGRAMS.values()]
    assert found[1024] >= sum(ranks == 1024 for ranks in most)
    assert found[64] >= len(cluster_scale.PROGRAMS)


def test_a_step_of_70_billion_comes_out_again_and_is_that_of_all_ranks():
    again = cluster_shapes.measure("sharded")
    for name in VIRTUAL:
        assert again[name] == SHAPES["sharded"][name]
        assert again[name] == SHAPES["sharded, all ranks run"][name]


def test_its_bytes_are_those_of_the_plan():
    """But for the root unit, gathered once a step, and the layers' norms: rank 0 holds
    them whole, in front of each layer's flat shard, with gradients in bf16."""
    config = cluster_shapes.LLAMA_70B
    layout = Layout(data=8, tensor=8, zero=3, sequence_parallel=True)
    planned: Counter[str] = Counter()
    for one in traffic_per_step(config, layout, 4096, dtypes="fsdp2"):
        if (one.axis, one.what) != ("tensor", "gradients"):
            planned[one.algorithm] += one.size * one.times
    hidden, vocab = config.hidden_size, config.vocab_size
    root = 2 * (2 * vocab * hidden // 8 + hidden)
    norms = 2 * config.num_hidden_layers * hidden
    assert SHAPES["sharded"]["sent"] == {
        "all_gather 8": planned["ring_all_gather"] - root,
        "reduce_scatter 8": planned["ring_reduce_scatter"],
        "all_reduce 8": planned["ring_all_reduce"] + 2 * norms,
    }


def test_the_bytes_of_a_pipeline_with_experts_are_those_of_the_plan():
    program = cluster_shapes.PROGRAMS["pipeline with experts"]
    layout = Layout(
        data=program.expert, expert=program.expert, pipeline=program.pipeline,
        micro_batches=program.micro_batches,
    )  # fmt: skip
    planned: Counter[str] = Counter()
    for one in traffic_per_step(program.config, layout, cluster_shapes.SEQUENCE):
        planned[one.axis] += one.size * one.times
    assert SHAPES["pipeline with experts"]["sent"] == {
        "all_to_all 4": planned["expert"],
        "message 2": planned["pipeline"],
    }


def test_small_programs_have_the_recorded_virtual_times():
    rows = [row for row in page.scale_rows() if row["ranks"] == 64]
    for name, count in (("tree", 1), ("fsdp", 2)):
        again = cluster_scale.measure(name, 64)
        assert len(again) == count
        for row in again:
            (same,) = [each for each in rows if each["program"] == row["program"]]
            assert row["virtual_seconds"] == pytest.approx(same["virtual_seconds"])
