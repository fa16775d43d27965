"""The classic bugs of lc5: broken twins fail the checks that the right code passes."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from snippets.wrong.lc5 import (
    backward_by_hand,
    copies_drift,
    fewer_than_ranks,
    first_letter,
    freed_view,
    fresh_buffer,
    hooks_bypassed,
    loss_scale,
    next_is_previous,
    norm_per_stage,
    not_cut,
    recompute,
    send_first,
    slot_for_micro_batch,
    tags,
    unchecked_sizes,
    weight_store,
)
from torch import nn

from tests.snippets.gallery import all_fail, drawn, ranks, some_fail
from xtrain import schedules
from xtrain.comm import exchange_all
from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.testing import RankTimeout
from xtrain.whiteboard.pipeline_parallel.gpipe_step import gpipe_step
from xtrain.whiteboard.pipeline_parallel.one_f_one_b_step import one_f_one_b_step
from xtrain.zero import clip_sharded_grad_norm_

GPIPE = "xtrain.whiteboard.pipeline_parallel.gpipe_step:gpipe_step"
ONE_F_ONE_B = "xtrain.whiteboard.pipeline_parallel.one_f_one_b_step:one_f_one_b_step"
RUNNER = "xtrain.pipeline_parallel.runner:PipelineRunner"
VALIDATE = "xtrain.schedules.validate:validate"
DDP = "xtrain.data_parallel.ddp:DistributedDataParallel"


def stages_of(size: int, width: int = 3) -> list[nn.Linear]:
    """The same on all ranks, and no two alike."""
    stages = [nn.Linear(width, width, dtype=torch.float64) for _ in range(size)]
    for number, stage in enumerate(stages):
        stage.weight.data, stage.bias.data = drawn(number, width, width), drawn(9, 3)
    return stages


def squares(output, target):
    """Targets of 0 do not count."""
    return (output - target).square()[target != 0].sum(), (target != 0).sum()


# ---------------------------------------------------------------------------- the loop


def step_is_one_process(step, m, targets=None) -> None:
    """Two rows a micro-batch; the gradients of this rank's stage."""
    rank, size = ranks()
    stages, x = stages_of(size), drawn(20, 2 * m, 3)
    targets = drawn(21, 2 * m, 3) if targets is None else targets
    total, count = squares(nn.Sequential(*stages)(x), targets)
    right = torch.autograd.grad(total / count, list(stages[rank].parameters()))
    step(stages[rank], squares, x, targets, m, x[:2])
    dist.barrier()  # no rank leaves before the others have compared
    for parameter, expected in zip(stages[rank].parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def step_of_the_library(stage, loss_fn, inputs, targets, m, activation):
    rank, size = ranks()
    schedule = schedules.one_f_one_b(size, m)
    runner = PipelineRunner(PipelineStage(stage, rank, size), schedule, loss_fn)
    runner.step(inputs, targets)


def slots_with_counted_targets(stage, loss_fn, inputs, targets, m, activation):
    """The twin divides by rows; here every element of a row counts."""

    def per_row(output, target):
        total, count = loss_fn(output, target)
        return total / 3, count

    slot_for_micro_batch.one_f_one_b(stage, per_row, inputs, targets, m, activation)


@pytest.mark.verifies(ONE_F_ONE_B, RUNNER)
def test_a_slot_is_no_micro_batch_when_there_are_more_of_these(worlds):
    check, wrong = step_is_one_process, slots_with_counted_targets
    for size in (2, 3):
        for m in (size - 1, size, 2 * size, 2 * size + 1):
            for right in (one_f_one_b_step, step_of_the_library):
                worlds[size].run(check, right, m)
            if m <= size:  # what hides it
                worlds[size].run(check, wrong, m)
            else:  # the last rank has its gradient from the loss
                some_fail(worlds[size], range(size - 1), check, wrong, m)


def by_ranks(stage, loss_fn, inputs, targets, m, activation):
    loss_scale.step(loss_scale.by_ranks, stage, inputs, targets, m)


def mean_of_means(stage, loss_fn, inputs, targets, m, activation):
    loss_scale.step(loss_scale.mean_of_means, stage, inputs, targets, m)


@pytest.mark.verifies(GPIPE, ONE_F_ONE_B, RUNNER)
def test_gradients_are_divided_by_the_count_of_the_batch(worlds):
    check, world = step_is_one_process, worlds[2]
    uneven = torch.tensor([1.0] * 5 + [0.0] * 3).double().unsqueeze(1).expand(8, 3)
    for right in (gpipe_step, one_f_one_b_step, step_of_the_library):
        for m, targets in ((2, None), (4, None), (4, uneven)):
            world.run(check, right, m, targets)
    world.run(check, by_ranks, 2)  # what hides it: as many micro-batches as ranks
    all_fail(world, check, by_ranks, 4)
    world.run(check, mean_of_means, 4)  # what hides it: equal counts
    all_fail(world, check, mean_of_means, 2, uneven[2:6])


class Cut(not_cut.Stage):
    """The right stage: it builds what it runs."""

    def __init__(self, blocks, rank, size):
        super().__init__(blocks, rank, size)
        self.blocks = nn.ModuleDict({str(n): self.blocks[n] for n in self.mine})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x).relu()
        return x


def parameters_and_output(stage_class) -> tuple[int, list[float]]:
    rank, size = ranks()
    torch.manual_seed(0)
    stage = stage_class(8, rank, size)
    y = stage(torch.ones(1, 64))
    return sum(p.numel() for p in stage.parameters()), y.flatten().tolist()


def test_the_parameters_of_all_stages_are_those_of_the_model(worlds):
    for size in (2, 4):
        cut = worlds[size].run(parameters_and_output, Cut)
        whole = worlds[size].run(parameters_and_output, not_cut.Stage)
        right = 8 * (64 * 64 + 64)
        assert sum(count for count, _ in cut) == right
        assert sum(count for count, _ in whole) == size * right
        assert [y for _, y in cut] == [y for _, y in whole], "values do not show it"
    assert worlds[1].run(parameters_and_output, not_cut.Stage)[0][0] == right


class Kept(nn.Module):
    """Keeps what it was given."""

    def __init__(self, module):
        super().__init__()
        self.module, self.given = module, []

    def forward(self, x):
        self.given.append(x.detach().clone())
        return self.module(x)


def forward_by_gpipe(stage, x):
    """What the stage is given by the right loop: one micro-batch, a loss of no use."""
    kept = Kept(stage)
    gpipe_step(kept, squares, x, torch.ones_like(x), 1, x)
    return kept.given[0]


def stage_is_given_what_the_one_before_made(forward) -> None:
    rank, size = ranks()
    stages, x = stages_of(size), drawn(20, 2, 3)
    given = forward(stages[rank], x)
    dist.barrier()
    torch.testing.assert_close(given, nn.Sequential(*stages[:rank])(x))


@pytest.mark.verifies(GPIPE)
def test_every_stage_is_given_the_activation_of_one_process(worlds):
    check = stage_is_given_what_the_one_before_made
    for size in (2, 3):
        worlds[size].run(check, forward_by_gpipe)
        some_fail(worlds[size], range(1, size), check, fresh_buffer.forward)
    worlds[1].run(check, fresh_buffer.forward)  # what hides it: there is no message


# ------------------------------------------------------------------------ the messages


def both_arrive(in_order) -> None:
    rank, _ = ranks()
    activation, gradient = torch.tensor([1.0 - rank]), torch.tensor([2.0 - 2 * rank])
    in_order(activation, gradient)
    assert (activation.item(), gradient.item()) == (1.0, 2.0)


def in_the_order_of_sends(activation, gradient):
    """Right: no tags, and both sides in one order."""
    rank, _ = ranks()
    op = dist.isend if rank == 0 else dist.irecv
    both = [dist.P2POp(op, t, 1 - rank) for t in (activation, gradient)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


@pytest.mark.verifies(VALIDATE)
def test_without_tags_the_order_of_receives_is_that_of_the_sends(worlds):
    worlds[2].run(both_arrive, in_the_order_of_sends)
    by_tags = partial(tags.two_messages, tags=True)
    without_tags = partial(tags.two_messages, tags=False)
    worlds[2].run(both_arrive, by_tags)  # what hides it: gloo has tags
    some_fail(worlds[2], [1], both_arrive, without_tags)


def neighbours_swap(swap) -> None:
    rank, _ = ranks()
    mine, came = torch.tensor([10.0 + rank]), torch.empty(1)
    swap(mine, came, 1 - rank)
    assert came.item() == 11.0 - rank


def swap_at_once(send, recv, peer):
    exchange_all([(send, peer)], [(recv, peer)])


@pytest.mark.verifies("xtrain.comm.p2p:exchange_all")
def test_neighbours_that_both_send_first_wait_for_each_other(worlds):
    worlds[2].run(neighbours_swap, swap_at_once)
    with pytest.raises(RankTimeout) as caught:
        worlds[2].run(neighbours_swap, send_first.swap, timeout=2)
    for report in caught.value.reports:
        assert "waiting in send(" in report.summary


def inputs_and_gradients_arrive(swap) -> None:
    rank, size = ranks()
    output, gradient = torch.tensor([10.0 + rank]), torch.tensor([-10.0 - rank])
    x, dy = swap(output, gradient, size)
    dist.barrier()
    assert x.item() == 10 + (rank - 1) % size
    assert dy.item() == -10 - (rank + 1) % size


def swap_in_one_order(output, gradient, size):
    """Right: sends and receives by what they carry, not by where it goes."""
    rank, _ = ranks()
    after, before = (rank + 1) % size, (rank - 1) % size
    x, dy = torch.empty_like(output), torch.empty_like(gradient)
    exchange_all([(output, after), (gradient, before)], [(x, before), (dy, after)])
    return x, dy


@pytest.mark.verifies("xtrain.comm.p2p:exchange_all")
def test_on_two_ranks_the_next_one_is_the_previous_one(worlds):
    check, wrong = inputs_and_gradients_arrive, next_is_previous.swap_both_ways
    for size in (2, 3):
        worlds[size].run(check, swap_in_one_order)
    all_fail(worlds[2], check, wrong)
    worlds[3].run(check, wrong)  # what hides it


# ----------------------------------------------------------------------- the backwards


def by_torch(weights, xs, dy):
    x = xs[0].clone().requires_grad_()
    leaves = [w.detach().clone().requires_grad_() for w in weights]
    y = x
    for w in leaves:
        y = y @ w.t()
    y.backward(dy)
    for w, leaf in zip(weights, leaves, strict=True):
        w.grad = w.grad + leaf.grad
    return x.grad


def advanced_and_added(weights, xs, dy):
    """The two twins, each without its bug."""
    for w, x in zip(reversed(weights), reversed(xs), strict=True):
        w.grad = w.grad + dy.t() @ x
        dy = dy @ w
    return dy


def test_several_layers_and_micro_batches_show_a_backward_by_hand():
    off_by, broken = backward_by_hand.off_by, 0.1
    sizes = list(itertools.product((1, 2, 3), (1, 2)))
    for right in (by_torch, advanced_and_added):
        assert all(off_by(right, *size) < 1e-6 for size in sizes)
    for layers, m in sizes:
        off = off_by(backward_by_hand.not_advanced, layers, m)
        assert (off > broken) == (layers > 1), (layers, m)
        off = off_by(backward_by_hand.overwritten, layers, m)
        assert (off > broken) == (m > 1), (layers, m)


def gradient_is_of_all_uses(part, combine) -> None:
    """`part` makes this rank's gradients; `combine` makes them whole."""
    rank, _ = ranks()
    table = drawn(1, 4, 2).requires_grad_()
    first, second = (stages_of(2, 3)[n] for n in (0, 1))
    ids, x = torch.tensor([0, 2]), drawn(2, 2, 5, 3)
    if part == "tied":
        (table[ids] @ table.t()).square().sum().backward()
        right, table.grad = [table.grad], None
        found = [copies_drift.tied(table, ids)]
    else:
        second(first(x)).square().sum().backward()
        right = [first.weight.grad, second.weight.grad]
        first.weight.grad = second.weight.grad = None
        found = copies_drift.mirrored(first, second, x[rank])
    for grad in found:
        combine(grad)
    dist.barrier()
    for grad, expected in zip(found, right, strict=True):
        torch.testing.assert_close(grad, expected)


def leave(grad):
    pass


@pytest.mark.parametrize("part", ["tied", "mirrored"])
def test_copies_of_a_weight_need_the_sum_of_their_gradients(worlds, part):
    worlds[2].run(gradient_is_of_all_uses, part, dist.all_reduce)
    all_fail(worlds[2], gradient_is_of_all_uses, part, leave)


def checkpoint_of_torch(module, x):
    return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)


def gradient_is_kept(checkpoint, module, computed: bool) -> None:
    """The gradient of x, a leaf or computed, is the one without recomputation."""
    grads = []
    for function in (lambda m, x: m(x), checkpoint):
        x = drawn(3, 50).requires_grad_()
        torch.manual_seed(0)
        function(module, x * 2 if computed else x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_recomputation_is_cut_off_and_draws_the_same_numbers():
    attached, detached = (
        lambda module, x, cut=cut: recompute.Checkpoint.apply(module, cut, x)
        for cut in (False, True)
    )
    tanh, dropout = nn.Tanh(), nn.Dropout(0.5)
    for module, computed in itertools.product((tanh, dropout), (False, True)):
        gradient_is_kept(checkpoint_of_torch, module, computed)
    with pytest.raises(AssertionError):
        gradient_is_kept(attached, tanh, computed=False)
    with pytest.raises(RuntimeError, match="second time"):
        gradient_is_kept(attached, tanh, computed=True)
    for computed in (False, True):
        gradient_is_kept(detached, tanh, computed)  # what hides the other one
        with pytest.raises(AssertionError):
            gradient_is_kept(detached, dropout, computed)


# ------------------------------------------------------------------ a backward in two


def in_two_parts(stage, loss, x):
    hooks_bypassed.backward_input(loss, x, stage.parameters())[1]()


def data_ranks_agree(backward, local) -> None:
    rank, size = ranks()
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.ones(1, 2)
    stage = DistributedDataParallel(layer)
    x = torch.full((1, 2), 1.0 + 2 * rank, requires_grad=True)
    with stage.no_sync() if local else nullcontext():
        backward(stage, stage(x).sum(), x)
    if local:
        stage.reduce_gradients()
    dist.barrier()
    torch.testing.assert_close(layer.weight.grad, torch.full((1, 2), float(size)))


def plain(stage, loss, x):
    loss.backward()


@pytest.mark.verifies(DDP)
def test_gradients_that_no_hook_has_seen_are_not_reduced(worlds):
    worlds[2].run(data_ranks_agree, plain, False)
    worlds[2].run(data_ranks_agree, in_two_parts, True)
    all_fail(worlds[2], data_ranks_agree, in_two_parts, False)
    worlds[1].run(data_ranks_agree, in_two_parts, False)  # what hides it


def weight_gradients(function, layers) -> list[torch.Tensor]:
    for w in layers:
        w.grad = None
    y = torch.ones(1)
    for w in layers:
        y = y * w
    function(y, layers, torch.ones(1))
    return [w.grad for w in layers]


def by_parameter(y, layers, dy):
    """Right: a weight is asked for once, however many layers have it."""
    weight_store.by_layer(y, list(dict.fromkeys(layers)), dy)


def test_a_weight_of_two_layers_is_counted_once():
    w, v = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0))
    for function, times in ((by_parameter, 1), (weight_store.by_layer, 2)):
        assert weight_gradients(function, [w, v]) == [3.0, 2.0]  # what hides it
        assert weight_gradients(function, [w, w])[0] == 4.0 * times


def test_a_part_that_was_put_away_is_asked_for():
    w, v = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0))
    for actions, right in ((["B", "W"], 3.0), (["B", "B", "W", "W"], 6.0)):
        w.grad = v.grad = None
        weight_store.always_stored(w * v, [w, v], torch.ones(1), actions)
        assert w.grad.item() == right  # what hides it
    w.grad = None
    weight_store.always_stored(w * v, [w, v], torch.ones(1), ["BW", "BW"])
    assert w.grad is None


# ----------------------------------------------------------------------- the schedules


def makespan_of_ours(orders, cost):
    actions = tuple(schedules.parse_actions(" ".join(order)) for order in orders)
    schedule = copy.copy(schedules.gpipe(len(orders), len(orders[0]) // 2))
    object.__setattr__(schedule, "actions", actions)
    times = (cost["F"], cost["B"], cost["W"])
    return schedules.simulate(schedule, *times).makespan


@pytest.mark.verifies("xtrain.schedules.simulate:simulate")
def test_a_whole_backward_takes_the_time_of_both_parts():
    for p, m, cost in itertools.product(
        (1, 2, 4), (1, 4, 8), ((1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (1.0, 2.0, 0.0))
    ):
        for schedule in (first_letter.gpipe, first_letter.one_f_one_b):
            by_kind = dict(zip("FBW", cost, strict=True))
            right, orders = (m + p - 1) * sum(cost), schedule(p, m)
            assert makespan_of_ours(orders, by_kind) == right
            found = first_letter.makespan(orders, by_kind)
            assert (found == right) == (cost[2] == 0), (p, m, cost)


def library_order(rank, p, m):
    return list(map(str, schedules.one_f_one_b(p, m).actions[rank]))


def validated(order, p, m) -> None:
    actions = tuple(
        schedules.parse_actions(" ".join(order(rank, p, m))) for rank in range(p)
    )
    schedule = copy.copy(schedules.one_f_one_b(p, m))
    object.__setattr__(schedule, "actions", actions)
    schedules.validate(schedule)


@pytest.mark.verifies(VALIDATE, "xtrain.schedules.one_f_one_b:one_f_one_b")
def test_fewer_micro_batches_than_ranks_shorten_the_warm_up():
    for p, m in itertools.product((1, 2, 3, 4), range(1, 9)):
        validated(library_order, p, m)
        if m >= p - 1:  # what hides it
            validated(fewer_than_ranks.order, p, m)
        else:
            with pytest.raises(ValueError, match="outside the stages"):
                validated(fewer_than_ranks.order, p, m)


@pytest.mark.verifies("xtrain.schedules.dualpipe:dualpipe")
def test_dualpipe_with_other_sizes_leaves_out_micro_batches_or_invents_them():
    for m in range(1, 13):
        right = unchecked_sizes.backwards(4, m) == [1] * m
        assert right == (m >= 8 and m % 2 == 0), m
        if right:
            schedules.validate(schedules.dualpipe(4, m))
        else:
            with pytest.raises(ValueError, match=f"micro_batches={m}"):
                schedules.dualpipe(4, m)


# ----------------------------------------------------------- the norm, and the memory


def clip_all(stage, max_norm):
    return clip_sharded_grad_norm_([p.grad for p in stage.parameters()], max_norm)


def all_stages_are_scaled_alike(clip) -> None:
    rank, size = ranks()
    whole = drawn(5, size, 4) * 3
    stage = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    stage.weight.grad = whole[rank : rank + 1].clone()
    norm = clip(stage, 1.0)
    dist.barrier()
    torch.testing.assert_close(norm, whole.norm(), check_dtype=False)
    scaled = whole[rank : rank + 1] / whole.norm()
    torch.testing.assert_close(stage.weight.grad, scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.verifies("xtrain.zero.clip:clip_sharded_grad_norm_")
def test_the_norm_is_of_all_stages(worlds):
    for size in (2, 3):
        worlds[size].run(all_stages_are_scaled_alike, clip_all)
        all_fail(worlds[size], all_stages_are_scaled_alike, norm_per_stage.clip)
    worlds[1].run(all_stages_are_scaled_alike, norm_per_stage.clip)  # what hides it


def view_of_its_own(x):
    """Right: a copy, so nothing else is kept alive."""
    return freed_view.view(x).clone()


def test_a_view_that_is_freed_keeps_the_memory_of_its_base():
    assert freed_view.bytes_kept(freed_view.whole) == 0
    assert freed_view.bytes_kept(view_of_its_own) == 0
    assert freed_view.bytes_kept(freed_view.view) == 4 * 1000 * 4
