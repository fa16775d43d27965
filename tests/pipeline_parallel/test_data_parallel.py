"""Stages on several data ranks under every wrapper, against one process."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.pipeline_parallel.data_training import (
    Layout,
    OneProcess,
    Training,
    largest_error,
    rows_of,
    whole_batch,
)
from tests.pipeline_parallel.pipelines import squares
from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.pipeline_parallel.torch_wrappers import UNUSED
from xtrain.testing import expect_error
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

WRAPPERS = "plain", "ddp", "zero 1", "zero 2", "fsdp", "fsdp kept"
REDUCE_ONCE = "ddp", "zero 1", "zero 2", "fsdp", "fsdp kept"
TORCHS = ["torch ddp"]
SHARDS = hasattr(FSDPModule, UNUSED)
if SHARDS:
    TORCHS.append("torch fsdp")
STEPS = 3
RUNNER = (
    "xtrain.pipeline_parallel.runner:PipelineRunner",
    "xtrain.pipeline_parallel.gradients:Reductions",
    "xtrain.pipeline_parallel.stage:PipelineStage",
    "xtrain.pipeline_parallel.executor:Executor",
)
WRAPPED = (
    "xtrain.data_parallel.ddp:DistributedDataParallel",
    "xtrain.zero.optimizer:ZeroOptimizer",
    "xtrain.zero.fsdp:FullyShardedDataParallel",
)
CHECKS = (
    "xtrain.pipeline_parallel.wrappers:check_wrappers",
    "xtrain.pipeline_parallel.wrappers:check_reduction",
    "xtrain.pipeline_parallel.wrappers:check_inside",
    "xtrain.pipeline_parallel.wrappers:check_shared",
    "xtrain.pipeline_parallel.checks:check_pipeline",
)


# --- training -------------------------------------------------------------------------


def trained(layouts: list[Layout]) -> dict[Layout, tuple[float, ...]]:
    """The largest errors of loss, gradients and weights in STEPS steps."""
    errors = {}
    for layout in layouts:
        run = Training(layout)
        one = OneProcess(run.schedule.stages + 1, layout.data)
        far = [0.0, 0.0, largest_error(run.weights(), one.weights())]
        for step in range(STEPS):
            wanted, gradients = one.step(step)
            far[0] = max(far[0], (run.step(step) - wanted).abs().item())
            far[1] = max(far[1], largest_error(run.gradients(), gradients))
            run.update()
            one.optimizer.step()
            far[2] = max(far[2], largest_error(run.weights(), one.weights()))
        errors[layout] = tuple(map(float, far))
    return errors


def check(world, layouts):
    size = layouts[0].pipeline * layouts[0].data
    for errors in world(size).run(trained, layouts):
        for layout, far in errors.items():
            assert max(far) < 1e-12, (layout, far)


@pytest.mark.verifies(*RUNNER)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_stages_under_a_wrapper_train_as_one_process(world, wrapper):
    """One direction, backward in two parts, and mirrored stages."""
    schedules = "interleaved", "zb_v", "dualpipe"
    check(world, [Layout(wrapper, schedule) for schedule in schedules])


@pytest.mark.verifies(
    *RUNNER,
    "xtrain.pipeline_parallel.torch_wrappers:TorchDDP",
    "xtrain.pipeline_parallel.torch_wrappers:TorchFSDP",
)
@pytest.mark.parametrize("wrapper", TORCHS)
def test_stages_under_torchs_own_wrappers_train_as_one_process(world, wrapper):
    schedules = "one_f_one_b", "interleaved", "zb_h1", "dualpipe"
    check(world, [Layout(wrapper, schedule) for schedule in schedules])


@pytest.mark.verifies(*RUNNER, *WRAPPED)
def test_every_other_schedule_trains_as_one_process(world):
    layouts = [
        Layout("ddp", "gpipe"),
        Layout("fsdp", "one_f_one_b"),
        Layout("zero 2", "zb_h1"),
        Layout("zero 1", "dualpipe_v"),
    ]
    check(world, layouts)


@pytest.mark.verifies(*RUNNER, *WRAPPED)
def test_one_stage_or_three_data_ranks_train_as_one_process(world):
    for pipeline, data in ((1, 3), (2, 1), (2, 3)):
        wrappers = ("zero 2", "fsdp") if data == 3 else ("ddp", "zero 1")
        check(world, [Layout(w, "one_f_one_b", pipeline, data) for w in wrappers])


# --- when it is reduced ---------------------------------------------------------------


def one_step(layouts: list[Layout]) -> list[dict]:
    """What is sent over the data ranks in a step, and during which actions."""
    found = []
    for layout in layouts:
        run = Training(layout, watch=True)
        run.log.clear()
        run.step(0)
        log = [e for e in run.log if e.op != "all_gather"]  # FSDP's, of weights
        executed = run.runner.executed
        found.append(
            {
                "actions": [run.action_at(entry.at) for entry in log],
                "order": [a for a in executed if a.kind in ("BW", "W", "REDUCE")],
                "sent": sum(entry.sent for entry in log),
                "numel": sum(map(reduced_numel, run.stages)),
                "last stage": run.stages[-1].index,
            }
        )
    return found


def reduced_numel(stage: PipelineStage) -> int:
    """Elements that each reduction of a stage is about, padding included."""
    reduction = stage.reduction
    if isinstance(reduction, DistributedDataParallel):
        return sum(p.numel() for p in stage.parameters()) + 1  # the spare one
    if isinstance(reduction, FullyShardedDataParallel):
        return sum(g.layout.padded_numel for u in reduction.units for g in u.trainable)
    mine = set(stage.parameters())
    return sum(
        bucket.layout.padded_numel
        for bucket in reduction.buckets
        if bucket.parameters[0] in mine
    )


@pytest.mark.verifies(*RUNNER)
@pytest.mark.parametrize("wrapper", REDUCE_ONCE)
def test_each_stage_is_reduced_once_after_its_last_gradient(world, wrapper):
    """And nothing but FSDP's gathers is sent over the data ranks before."""
    layouts = [Layout(wrapper, name) for name in ("one_f_one_b", "interleaved", "zb_v")]
    by_rank = world(4).run(one_step, layouts)
    for case, layout in enumerate(layouts):
        for rank, found in enumerate(results[case] for results in by_rank):
            stages = {action.stage for action in found["order"]}
            reduced = {action and action.stage for action in found["actions"]}
            assert all(a and a.kind == "REDUCE" for a in found["actions"]), layout
            if wrapper == "zero 1":  # one optimizer for all stages of the rank
                assert reduced == {last_reduced(found["order"])}
            else:
                assert reduced == stages
            for stage in stages:
                own = [a.kind for a in found["order"] if a.stage == stage]
                assert own.count("REDUCE") == 1 and own[-1] == "REDUCE"
            both = found["sent"] + by_rank[rank ^ 1][case]["sent"]  # of a data group
            halves = 2 if wrapper == "ddp" else 1  # the other half is an all-gather
            assert both == 8 * halves * found["numel"], layout


def last_reduced(order) -> int:
    return [action.stage for action in order if action.kind == "REDUCE"][-1]


# --- several steps, and no step -------------------------------------------------------


def accumulated(wrapper: str) -> dict[str, float]:
    """Two steps without an update between, and evaluation around them."""
    run = Training(Layout(wrapper, "zb_v"), watch=True)
    one = OneProcess(run.schedule.stages + 1, 2)
    losses, sums = [], {}
    for step in range(2):
        loss, gradients = one.step(step)
        losses.append(loss)
        sums = {n: g + sums.get(n, 0.0) for n, g in gradients.items()}
    inputs, targets = whole_batch(7, 2)
    with torch.no_grad():
        total, count = squares(one.model(inputs), targets)
    errors = {"first evaluation": run.runner.evaluate(*rows_of(7, run.here))}
    errors["first step"] = run.step(0) - losses[0] + total / count
    for number, name in enumerate(("between", "after")):
        run.log.clear()
        errors[name] = run.runner.evaluate(*rows_of(7, run.here))
        assert {entry.op for entry in run.log} <= {"all_gather"}  # of FSDP's weights
        if number == 0 and wrapper != "plain":
            errors["second step"] = run.step(1) - losses[1] + total / count
    found = {name: abs(e - total / count).item() for name, e in errors.items()}
    if wrapper != "plain":  # there the caller has summed the first step's already
        found["gradients"] = float(largest_error(run.gradients(), sums))
    return found


@pytest.mark.verifies(*RUNNER)
@pytest.mark.parametrize("wrapper", [*WRAPPERS, *TORCHS])
def test_gradients_of_several_steps_add_up_and_evaluation_leaves_them(world, wrapper):
    for errors in world(4).run(accumulated, wrapper):
        assert max(errors.values()) < 1e-12, errors


class Fails(nn.Module):
    """Raises on one rank, in one micro-batch of its first step."""

    def __init__(self, inner: nn.Module, calls: int):
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, x):
        self.calls -= 1
        if self.calls == 0:
            raise ValueError("a bad micro-batch")
        return self.inner(x)


def failing(wrappers: tuple[str, ...]) -> list[float]:
    errors = []
    for wrapper in wrappers:
        run = Training(Layout(wrapper, "zb_v"))
        here = (run.pipeline.rank(), run.here) == (1, 1)
        inner = run.bare[run.stages[0].index]
        inner[0] = Fails(inner[0], 3 if here else -1)
        for _ in range(2):
            with pytest.raises(ValueError, match="F2, stage 1: a bad micro-batch"):
                run.step(0)
            inner[0].calls = 3 if here else -1
        inner[0] = inner[0].inner
        run.zero_grad()
        one = OneProcess(run.schedule.stages + 1, 2)
        wanted, gradients = one.step(0)
        errors.append((run.step(0) - wanted).abs().item())
        errors.append(float(largest_error(run.gradients(), gradients)))
    return errors


@pytest.mark.verifies("xtrain.pipeline_parallel.failure:StepFailure")
def test_a_stage_that_fails_on_one_data_rank_ends_the_step_of_all(world):
    for errors in world(4).run(failing, ("ddp", "zero 1", "zero 2")):
        assert max(errors) < 1e-12


# --- what is refused ------------------------------------------------------------------


def changed(run, what: str):
    """Wrap this rank's stage as the case says; the data group for its runner."""
    stage, summed = run.stages[0], {"gradient_reduction": "sum"}
    layer = stage.module[0].up.weight
    if "tied" in what:
        stage.shared = {"tied": layer}
    match what:
        case "a stage missing on one rank":
            if torch.distributed.get_rank() == 3:
                run.stages.clear()
        case "average on one pipeline rank":
            kind = "average" if run.pipeline.rank() == 0 else "sum"
            stage.module = DistributedDataParallel(
                stage.module, process_group=run.data, gradient_reduction=kind
            )
        case "torch's DDP over others" | "torch's DDP, static" | "torch's DDP inside":
            alone = [torch.distributed.new_group([rank]) for rank in range(4)]
            here = alone[torch.distributed.get_rank()]
            group = here if "others" in what else run.data
            stage.module = nn.parallel.DistributedDataParallel(
                stage.module, process_group=group, static_graph="static" in what
            )
            if "inside" in what:
                stage.module = nn.Sequential(stage.module)
        case "torch's FSDP, hybrid":
            fully_shard(stage.module, mesh=run.mesh)
        case "torch's FSDP inside":
            fully_shard(stage.module[0], mesh=run.mesh["data"])
        case "naive":
            stage.module = NaiveDataParallel(stage.module, run.data, "sum")
        case "tied, then sharded" | "sharded, then its shard shared":
            fsdp = FullyShardedDataParallel(stage.module, run.data, **summed)
            stage.module = fsdp
            if "tied" not in what:
                stage.shared = {"tied": fsdp.module[0].up.weight}
        case "tied, ZeRO on one end" if run.pipeline.rank() == 1:
            stage.reduction = ZeroOptimizer(
                stage.parameters(), torch.optim.AdamW, process_group=run.data, **summed
            )
        case "DDP inside" | "no data group" | "tied, ZeRO on one end":
            stage.module = DistributedDataParallel(
                stage.module, process_group=run.data, **summed
            )
            if what == "DDP inside":
                stage.module = nn.Sequential(stage.module)
    groups = {"no data group": None, "the pipeline for data": run.pipeline}
    return groups.get(what, run.data)


REFUSED = {
    "a stage missing on one rank": r"stages \[\]|cut into \[\]",
    "average on one pipeline rank": "gradient_reduction='average'.*must be \"sum\"",
    "no data group": "sums gradients over ranks .* has no data_group",
    "torch's DDP over others": "TorchDDP sums gradients over ranks",
    "torch's DDP, static": "static_graph=True",
    "torch's DDP inside": "DistributedDataParallel would reduce gradients in every",
    "torch's FSDP, hybrid": "one axis of a mesh of several"
    if SHARDS
    else "fully_shard of torch .* reduces no parameter that has no gradient",
    "torch's FSDP inside": "FSDP.* would reduce gradients in every backward",
    "DDP inside": "DistributedDataParallel would reduce gradients in every backward",
    "naive": r"NaiveDataParallel has no no_sync\(\)",
    "the pipeline for data": "different .*rank in the pipeline",
    "tied, then sharded": "shares 'tied' .* its wrapper holds a shard of that",
    "sharded, then its shard shared": "shares 'tied' .* its wrapper holds a shard",
    "tied, ZeRO on one end": "'tied' is .* of ZeRO .*be ZeRO's or none",
}


def made(what: str) -> None:
    run = Training(Layout("plain", "one_f_one_b"))
    data_group = changed(run, what)
    PipelineRunner(
        run.stages, run.schedule, squares, run.pipeline, data_group=data_group
    )


@pytest.mark.verifies(*CHECKS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_reduce_is_refused_on_every_rank(world, xtrain_worlds, what):
    if "torch's FSDP" in what and xtrain_worlds.device != "cpu":
        pytest.skip("what torch's classes do is looked at on CPUs")
    expect_error(world(4), made, what, error=ValueError, match=REFUSED[what])


def wrapped_late() -> None:
    run = Training(Layout("plain", "one_f_one_b"))
    if run.pipeline.rank() == 0:
        changed(run, "no data group")
    run.step(0)


@pytest.mark.verifies(*RUNNER)
def test_a_stage_wrapped_after_the_runner_was_made_is_refused(world):
    words = "wrapped after they were handed to the runner"
    expect_error(world(4), wrapped_late, error=ValueError, match=words)
