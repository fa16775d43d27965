"""The self-check of a whiteboard form's download, on warm ranks.

The download runs it on 4 ranks in float64; here it runs on groups of every size, on two
groups side by side, and in each dtype.
"""

import contextlib
import importlib
import io

import pytest
import torch.distributed as dist

from xtrain.copying.forms import forms
from xtrain.copying.self_checks.harness import BOUNDS

DP = "xtrain.whiteboard.data_parallel"
CP = "xtrain.whiteboard.context_parallel"
TP = "xtrain.whiteboard.tensor_parallel"
CASES = [
    pytest.param(
        "distributed_data_parallel",
        marks=pytest.mark.verifies(
            f"{DP}.distributed_data_parallel:DistributedDataParallel"
        ),
    ),
    pytest.param(
        "distributed_sampler",
        marks=pytest.mark.verifies(f"{DP}.distributed_sampler:DistributedSampler"),
    ),
    pytest.param(
        "naive_data_parallel",
        marks=pytest.mark.verifies(f"{DP}.naive_data_parallel:NaiveDataParallel"),
    ),
    pytest.param(
        "all_gather_attention",
        marks=pytest.mark.verifies(f"{CP}.all_gather_attention:all_gather_attention"),
    ),
    pytest.param(
        "flash_attention_backward",
        marks=pytest.mark.verifies(
            f"{CP}.flash_attention_backward:flash_attention_backward"
        ),
    ),
    pytest.param(
        "flash_attention_forward",
        marks=pytest.mark.verifies(
            f"{CP}.flash_attention_forward:flash_attention_forward"
        ),
    ),
    pytest.param(
        "online_softmax",
        marks=pytest.mark.verifies(f"{CP}.online_softmax:online_softmax"),
    ),
    pytest.param(
        "ring_attention_backward",
        marks=pytest.mark.verifies(
            f"{CP}.ring_attention_backward:ring_attention_backward"
        ),
    ),
    pytest.param(
        "ring_attention_forward",
        marks=pytest.mark.verifies(
            f"{CP}.ring_attention_forward:ring_attention_forward"
        ),
    ),
    pytest.param(
        "shard_sequence",
        marks=pytest.mark.verifies(f"{CP}.shard_sequence:shard_sequence"),
    ),
    pytest.param(
        "ulysses_attention",
        marks=pytest.mark.verifies(f"{CP}.ulysses_attention:ulysses_attention"),
    ),
    pytest.param(
        "column_parallel_linear",
        marks=pytest.mark.verifies(f"{TP}.column_parallel_linear:ColumnParallelLinear"),
    ),
    pytest.param(
        "row_parallel_linear",
        marks=pytest.mark.verifies(f"{TP}.row_parallel_linear:RowParallelLinear"),
    ),
    pytest.param(
        "ring_all_gather_matmul",
        marks=pytest.mark.verifies(
            f"{TP}.ring_all_gather_matmul:ring_all_gather_matmul"
        ),
    ),
    pytest.param(
        "ring_matmul_reduce_scatter",
        marks=pytest.mark.verifies(
            f"{TP}.ring_matmul_reduce_scatter:ring_matmul_reduce_scatter"
        ),
    ),
    pytest.param(
        "rotary_embedding",
        marks=pytest.mark.verifies(f"{TP}.rotary_embedding:rotary_embedding"),
    ),
    pytest.param(
        "sequence_parallel_region",
        marks=pytest.mark.verifies(
            f"{TP}.sequence_parallel_region:SequenceParallelRegion"
        ),
    ),
    pytest.param(
        "tensor_parallel_attention",
        marks=pytest.mark.verifies(
            f"{TP}.tensor_parallel_attention:TensorParallelAttention"
        ),
    ),
    pytest.param(
        "tensor_parallel_mlp",
        marks=pytest.mark.verifies(f"{TP}.tensor_parallel_mlp:TensorParallelMLP"),
    ),
    pytest.param(
        "vocab_parallel_cross_entropy",
        marks=pytest.mark.verifies(
            f"{TP}.vocab_parallel_cross_entropy:vocab_parallel_cross_entropy"
        ),
    ),
    pytest.param(
        "vocab_parallel_embedding",
        marks=pytest.mark.verifies(
            f"{TP}.vocab_parallel_embedding:VocabParallelEmbedding"
        ),
    ),
]
HALVES = ([0, 2], [1, 3])  # of 4 ranks, side by side


def checked(name: str) -> str:
    """Run the self-check of a form in every dtype; what it says on this rank."""
    folder = forms()[name].parent.name
    file = importlib.import_module(f"xtrain.copying.self_checks.{folder}.{name}")
    groups = [None]
    if dist.get_world_size() == 4:
        halves = [dist.new_group(members) for members in HALVES]
        groups.append(halves[dist.get_rank() % 2])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for group in groups:
            for dtype in BOUNDS:
                try:
                    file.check(group, dtype)
                except SystemExit as wrong:  # ends a download, not a warm rank
                    raise AssertionError(f"{dtype}: {wrong}") from None
    return said.getvalue()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_form_passes_its_self_check(world, name, size):
    said = world(size).run(checked, name)
    for first in (0, 1) if size == 4 else (0,):  # of the world, of each half
        assert said[first].count("right on every rank: ") >= len(BOUNDS)


def test_every_converted_folder_is_whole():
    folders = {"context_parallel", "data_parallel", "tensor_parallel"}
    converted = {n for n, path in forms().items() if path.parent.name in folders}
    assert {case.values[0] for case in CASES} == converted
