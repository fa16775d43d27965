"""The copies do what the library does, alone: four ranks, no xtrain, a reference."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.copying import standalone
from xtrain.copying.library import library

DRIVER = Path(__file__).with_name("on_ranks.py")
MAX_LINES = {  # of a copy; 250 for every other collective
    "exchange": 150,
    "DistributedDataParallel": 460,
    "ZeroOptimizer": 970,
    "FullyShardedDataParallel": 1025,
    "AdamW": 110,
    "ColumnParallelLinear": 765,
    "RowParallelLinear": 810,
    "VocabParallelEmbedding": 450,
    "HiddenParallelEmbedding": 350,
    "vocab_parallel_cross_entropy": 180,
    "ParallelSwiGLU": 1085,
    "ParallelAttention": 1355,
    "ParallelRMSNorm": 230,
    "online_softmax": 80,
    "ring_online_softmax": 200,
    "flash_attention_forward": 140,
    "flash_attention_backward": 130,
    "ring_attention": 910,  # any mask, balance and block
    "all_gather_attention": 800,
    "ulysses_attention": 890,
    "TopKRouter": 560,
    "Experts": 440,
    "MoE": 1110,
    "DeepSeekMoE": 1140,
    "GShardMoE": 1365,
    "moe_forward": 260,
    "moe_backward": 130,
    "load_balancing_loss": 210,
    "dispatch": 180,
    "combine": 200,
    "plan_placement": 310,
}
COLLECTIVES = [
    "exchange",
    "exchange_all",
    "ring_shift",
    "send",
    "recv",
    "isend",
    "irecv",
    "broadcast",
    "broadcast_naive",
    "reduce",
    "all_reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "barrier",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_all_gather",
    "tree_all_reduce",
    "halving_doubling_all_reduce",
    "one_shot_all_reduce",
    "parameter_server_all_reduce",
    "hierarchical_all_reduce",
    "all_to_all",
    "all_to_all_single",
    "exchange_split_sizes",
]
RINGS_BY_TORCH_NAMES = ["all_gather_into_tensor", "reduce_scatter_tensor"]
TRAINING = [
    "DistributedSampler",
    "NaiveDataParallel",
    "DistributedDataParallel",
    "Adam",
    "AdamW",
    "LossScaler",
    "MixedPrecisionOptimizer",
    "ZeroOptimizer",
    "FullyShardedDataParallel",
    "clip_sharded_grad_norm_",
    "save_checkpoint",
    "load_checkpoint",
]
CUT_OVER_RANKS = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "HiddenParallelEmbedding",
    "vocab_parallel_cross_entropy",
    "ParallelSwiGLU",
    "ParallelAttention",
    "ParallelRMSNorm",
]
OVER_ONE_SEQUENCE = [
    "online_softmax",
    "ring_online_softmax",
    "flash_attention_forward",
    "flash_attention_backward",
    "ring_attention",
    "all_gather_attention",
    "ulysses_attention",
    "hybrid_attention",
    "shard_sequence",
    "unshard_sequence",
    "local_positions",
]
MIXTURE_OF_EXPERTS = [
    "TopKRouter",
    "Experts",
    "MoE",
    "DeepSeekMoE",
    "GShardMoE",
    "moe_forward",
    "moe_backward",
    "load_balancing_loss",
    "router_z_loss",
    "sequence_balance_loss",
    "update_balance_bias",
    "within_capacity",
    "top_k_gradient",
    "plan_dispatch",
    "dispatch",
    "combine",
    "plan_placement",
]
ALGORITHMS = [
    *COLLECTIVES,
    *TRAINING,
    *CUT_OVER_RANKS,
    *OVER_ONE_SEQUENCE,
    *MIXTURE_OF_EXPERTS,
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What the driver printed, with the copies next to it and xtrain out of reach."""
    folder = tmp_path_factory.mktemp("copies")
    (folder / "xtrain.py").write_text("raise ImportError('no xtrain here')\n")
    for name in ALGORITHMS:
        (folder / f"{name}.py").write_text(standalone(library()[name]))
    driver = folder / DRIVER.name
    driver.write_text(DRIVER.read_text())
    return subprocess.run(
        [sys.executable, driver],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_every_algorithm_runs_from_its_copy_and_is_right(finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    checks = re.findall(r"^def (check_\w+)", DRIVER.read_text(), re.M)
    assert finished.stdout.split() == [w for name in checks for w in ("ok", name)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_driver_calls_every_copy(name):
    text = DRIVER.read_text()
    assert f'"{name}"' in text or f"{name}(" in text


@pytest.mark.parametrize("name", [*COLLECTIVES, *RINGS_BY_TORCH_NAMES, *MAX_LINES])
def test_a_copy_is_short(name):
    lines = len(standalone(library()[name]).splitlines())
    assert lines <= MAX_LINES.get(name, 250)


LEFT_OUT = ("Ledger", "all_gather_object", "compare_across", "check_same", "TCP_INFO")


@pytest.mark.parametrize(
    "name", [n for n in ALGORITHMS if not n.endswith("_checkpoint")]
)
def test_no_copy_has_the_ledger_or_asks_other_ranks_about_a_call(name):
    text = standalone(library()[name])
    assert [word for word in LEFT_OUT if word in text] == []
