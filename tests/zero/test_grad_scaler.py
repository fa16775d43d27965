"""torch's GradScaler on shards: what one rank finds, all ranks hear of.

ZeroOptimizer under it stands in test_optimizer.py, pairs with other features in the
support matrix.
"""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist

from tests.training import batch_of, largest_difference, loss_of, make_model
from xtrain.zero import FullyShardedDataParallel
from xtrain.zero.grad_scaler import shard_gradient


def overflow_on_one_rank(clip, fused, group_ranks=None):
    """Five steps; in the second one rank's gradient has an infinity in one element."""
    group = group_ranks and dist.new_group(group_ranks)
    rank = dist.get_rank(group)
    if rank < 0:
        return None
    models = [
        FullyShardedDataParallel(
            make_model(0, dtype=torch.float32), process_group=group
        )
        for _ in range(2)
    ]
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in models
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, owners = [], 0
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            scaled = model is models[0]
            if step == 1 and not scaled:
                continue
            loss = loss_of(model, batch_of(step, 0, rank))
            (scaler.scale(loss) if scaled else loss).backward()
            last = [p for p in model.parameters() if p.numel()][-1]
            if step == 1 and rank == 1:
                last.grad[-1] = math.inf
            if step == 1:
                owners = sum(bool(p.grad.isinf().any()) for p in model.parameters())
            if clip:
                if scaled:
                    scaler.unscale_(optimizer)
                model.clip_grad_norm_(1.0)
            before = [p.detach().clone() for p in model.parameters()]
            if scaled:
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            else:
                optimizer.step()
            if step == 1:
                assert all(map(torch.equal, before, model.parameters()))
            optimizer.zero_grad()
    return scales, owners, largest_difference(*(m.full_state_dict() for m in models))


@pytest.mark.verifies(
    "xtrain.zero.grad_scaler:ShardGradient",
    "xtrain.zero.grad_scaler:shard_gradient",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
@pytest.mark.parametrize(
    ("clip", "fused"), [(False, False), (True, False), (False, True)]
)
def test_an_infinity_in_one_rank_s_shard_skips_the_step_of_all(world, clip, fused):
    results = world(3).run(overflow_on_one_rank, clip, fused)
    assert [owners for _, owners, _ in results] == [0, 1, 0]
    for scales, _, difference in results:
        assert scales == [1024, 512, 512, 512, 1024]
        assert difference < 1e-6


@pytest.mark.verifies("xtrain.zero.grad_scaler:shard_gradient")
def test_only_the_shards_own_group_is_asked(world):
    found = world(3).run(overflow_on_one_rank, False, False, [0, 2])
    assert [result and result[:2] for result in found] == [
        ([1024, 512, 512, 512, 1024], 0),
        None,
        ([1024, 512, 512, 512, 1024], 1),
    ]


@pytest.mark.verifies("xtrain.zero.grad_scaler:ShardGradient")
def test_what_is_made_of_a_shards_gradient_is_a_plain_tensor():
    gradient = shard_gradient(torch.arange(3.0), None)
    made = [gradient * 2, copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))]
    assert {type(tensor) for tensor in made} == {torch.Tensor}
    assert [tensor.tolist() for tensor in made] == [[0, 2, 4], [0, 1, 2], [0, 1, 2]]
    made[1].zero_()
    assert gradient.tolist() == [0, 1, 2]
