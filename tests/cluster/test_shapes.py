"""Models on "meta": bytes as `xtrain.plan` counts them, and one rank for its likes."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from xtrain.cluster import VirtualCluster, dgx_h100
from xtrain.model import XtrainConfig, XtrainModel, batch_group
from xtrain.pipeline_parallel import PipelineRunner
from xtrain.plan import Layout, sent_by_axis, traffic_per_step
from xtrain.schedules import one_f_one_b
from xtrain.zero import FullyShardedDataParallel

CLUSTER = "xtrain.cluster.virtual_cluster:VirtualCluster"
CONFIG = XtrainConfig(
    hidden_size=8192, intermediate_size=28_672, num_hidden_layers=2,
    num_attention_heads=64, num_key_value_heads=8, vocab_size=128_256,
)  # fmt: skip
SEQUENCE, TENSOR = 4096, 8
SHARE = {"all_reduce": 2}  # of a tensor, in times (N - 1) / N, that a rank sends


def sharded_step() -> None:
    size = torch.distributed.get_world_size()
    axes = {"data": size // TENSOR, "tensor": TENSOR}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    options = {"sequence_parallel": True, "device": "meta", "dtype": torch.bfloat16}
    model = FullyShardedDataParallel(
        XtrainModel(CONFIG, mesh, **options), device="meta"
    )
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    model(tokens, tokens).backward()


def cluster_of(size: int, **options) -> VirtualCluster:
    return VirtualCluster(
        size, dgx_h100(size // 8), accelerator="h100", record=True, **options
    )


def sent_by(cluster: VirtualCluster, rank: int) -> Counter:
    """Bytes by the distance of the ranks of a group, without agreements."""
    sent: Counter[int] = Counter()
    for kind, ranks, nbytes, *_ in cluster.record.transfers:
        if rank in ranks and len(ranks) > 1 and nbytes > 64:
            share = SHARE.get(kind, 1) * (len(ranks) - 1)
            sent[ranks[1] - ranks[0]] += share * nbytes // len(ranks)
    return sent


@pytest.mark.verifies(CLUSTER)
def test_one_rank_stands_for_all():
    """Times, bytes and memory of every rank, executed or not."""
    every, one = cluster_of(16), cluster_of(16, alike=lambda rank: 0)
    every.run(sharded_step)
    one.run(sharded_step)
    assert one.seconds == every.seconds
    assert sent_by(one, 0) == sent_by(every, 0) == sent_by(every, 13)
    for like, own in zip(one.devices, every.devices, strict=True):
        assert (like.peak, like.flops) == (own.peak, own.flops)


@pytest.mark.verifies("xtrain.cluster.compute:Device")
def test_a_step_sends_the_bytes_of_the_plan():
    """But for the root unit, gathered once a step, and the sums of norms at the end.

    These are left out: a shard of FSDP has other norms on each data rank.
    """
    cluster = cluster_of(64, alike=lambda rank: 0)
    cluster.run(sharded_step)
    layout = Layout(data=8, tensor=TENSOR, zero=3, sequence_parallel=True)
    transfers = traffic_per_step(CONFIG, layout, SEQUENCE, dtypes="fsdp2")
    norms = [t for t in transfers if (t.axis, t.what) == ("tensor", "gradients")]
    assert len(norms) == 1
    planned = sent_by_axis([t for t in transfers if t not in norms])
    hidden, vocab = CONFIG.hidden_size, CONFIG.vocab_size
    root = 2 * (2 * vocab * hidden // TENSOR + hidden)
    found = sent_by(cluster, 0)
    assert found[TENSOR] == planned["data"] - root * 7 // 8
    assert found[1] == planned["tensor"]


def pipeline_step(stages: int, micro_batches: int) -> None:
    axes = {"pipeline": stages, "tensor": TENSOR}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    schedule = one_f_one_b(stages, micro_batches)
    options = {"sequence_parallel": True, "device": "meta", "dtype": torch.bfloat16}
    own = XtrainModel.stages(CONFIG, mesh, schedule, **options)
    loss_fn, group = own[-1].module.loss_fn, mesh["pipeline"].get_group()
    runner = PipelineRunner(own, schedule, loss_fn, group)
    tokens = torch.zeros(micro_batches, SEQUENCE, dtype=torch.long, device="meta")
    runner.step(tokens, tokens)


@pytest.mark.verifies("xtrain.pipeline_parallel.runner:PipelineRunner")
def test_stages_send_the_messages_of_the_plan():
    cluster = cluster_of(16, alike=lambda rank: rank - rank % TENSOR)
    cluster.run(pipeline_step, 2, 4)
    layout = Layout(pipeline=2, tensor=TENSOR, sequence_parallel=True, micro_batches=4)
    planned = sent_by_axis(traffic_per_step(CONFIG, layout, SEQUENCE))["pipeline"]
    sent: Counter[int] = Counter()
    for kind, ranks, nbytes, *_ in cluster.record.transfers:
        if kind == "message" and nbytes > 4096:  # longer than a header
            sent[ranks[0]] += nbytes
    assert sent == {0: planned, TENSOR: planned}


EXPERTS = XtrainConfig(
    hidden_size=4096, intermediate_size=14_336, num_hidden_layers=4,
    num_attention_heads=32, num_key_value_heads=8, vocab_size=32_000,
    num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=14_336,
)  # fmt: skip


def expert_step(stages: int, expert: int, micro_batches: int) -> None:
    axes = {"pipeline": stages, "expert_data": 1, "expert": expert}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    schedule = one_f_one_b(stages, micro_batches)
    options = {"device": "meta", "dtype": torch.bfloat16}
    own = XtrainModel.stages(EXPERTS, mesh, schedule, **options)
    loss_fn, group = own[-1].module.loss_fn, mesh["pipeline"].get_group()
    data_group = batch_group(mesh)
    runner = PipelineRunner(own, schedule, loss_fn, group, data_group=data_group)
    tokens = torch.zeros(micro_batches, SEQUENCE, dtype=torch.long, device="meta")
    runner.step(tokens, tokens)


@pytest.mark.verifies("xtrain.expert_parallel.routing:even_counts")
@pytest.mark.parametrize("expert", [2, 4])
def test_experts_exchange_the_rows_of_the_plan(expert):
    stages, micro_batches = 2, 4
    cluster = VirtualCluster(
        stages * expert, dgx_h100(1), accelerator="h100", record=True
    )
    cluster.run(expert_step, stages, expert, micro_batches)
    layout = Layout(
        data=expert, expert=expert, pipeline=stages, micro_batches=micro_batches
    )
    planned = sent_by_axis(traffic_per_step(EXPERTS, layout, SEQUENCE))
    sent: Counter[str] = Counter()
    for kind, ranks, nbytes, *_ in cluster.record.transfers:
        if nbytes > 4096 and (0 in ranks if kind != "message" else ranks[0] == 0):
            sent[kind] += nbytes
    assert sent["all_to_all"] * (expert - 1) // expert == planned["expert"]
    assert sent["message"] == planned["pipeline"]


@pytest.mark.verifies(CLUSTER)
@pytest.mark.parametrize("like", [-1, 3, 4, 1.0])
def test_who_is_like_whom_is_checked(like):
    with pytest.raises(ValueError, match=f"alike: rank 0 is run by {like}, "):
        VirtualCluster(4, alike=lambda rank: like if rank == 0 else 0)
