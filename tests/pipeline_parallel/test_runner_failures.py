"""Every failure is raised on all ranks, and none of them waits for ever."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import xtrain.backends  # noqa: F401, names of its own
from tests.pipeline_parallel.pipelines import batch, layers, make, own, squares
from xtrain.comm import CommLedger, init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage, RankLost
from xtrain.schedules import Schedule, parse_actions, with_messages
from xtrain.testing import expect_error

SCHEDULES = ("gpipe", "zb_h1", "interleaved", "dualpipe", "zb_v")


class Mute(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise KeyError("no words")


class Trap(nn.Module):
    """A stage's module that goes wrong at a given call, in a given place."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.place, self.left = module, "", 0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.at_weight)
            break

    def set(self, place: str, calls: int) -> None:
        self.place, self.left = place, calls

    def goes_off(self, place: str) -> bool:
        self.left -= place == self.place
        return place == self.place and self.left == 0

    def forward(self, x: Tensor) -> Tensor:
        if self.goes_off("forward"):
            raise FloatingPointError("it overflowed")
        if self.goes_off("mute"):
            raise Mute
        y = self.module(x)
        if self.goes_off("shape"):
            y = y[:, :-1]
        if self.goes_off("dtype"):
            y = y.float()
        if self.goes_off("sparse"):
            y = y.detach().to_sparse()
        if y.requires_grad:
            y.register_hook(self.in_backward)
        return y

    def at_weight(self, _: Tensor) -> None:
        if self.goes_off("weight"):
            raise ZeroDivisionError("no scale")

    def in_backward(self, gradient: Tensor) -> None:
        if self.goes_off("backward"):
            raise ValueError("the gradient is bad")


def trapped(name: str, m: int = 8) -> tuple[PipelineRunner, list[Trap]]:
    """A runner whose every stage has a trap; the loss has one, too."""
    schedule = make(name, dist.get_world_size(), m)
    traps = [Trap(module) for module in layers(schedule.stages)]
    stages = own(traps, schedule, dist.get_rank())
    loss_trap = Trap(nn.Identity())

    def loss_fn(output: Tensor, target: Tensor):
        if loss_trap.goes_off("loss"):
            raise KeyError("no such label")
        if loss_trap.goes_off("several"):
            return (output - target).square().sum(-1), len(target)
        total, count = squares(output, target)
        if loss_trap.goes_off("detached"):
            return total.detach(), count
        for wrong in ("nan", "-3"):
            if loss_trap.goes_off(wrong):
                return total, float(wrong)
        return total if loss_trap.goes_off("alone") else (total, count)

    return PipelineRunner(stages, schedule, loss_fn), [*traps, loss_trap]


def fails_and_goes_on(name: str, place: str, steps_before: int) -> list[str]:
    """The error of the failing step on this rank; steps before and after it work.

    The trap is on one rank, in the second call of the first stage that it is on.
    """
    runner, traps = trapped(name)
    inputs, targets = batch(17)
    where = 1 % runner.schedule.ranks
    stage = -1 if place in OF_LOSS else runner.schedule.stages_of(where)[0]
    first = [runner.step(inputs, targets) for _ in range(steps_before)]
    before = [p.grad if p.grad is None else p.grad.clone() for p in runner.parameters]
    loss_here = stage == -1 and runner._needs_targets
    if loss_here or (stage >= 0 and runner.rank == where):
        traps[stage].set(place, 2)
    try:
        runner.step(inputs, targets)
    except (ValueError, RuntimeError) as error:
        said = type(error).__name__, str(error)
    else:
        said = "", ""
    after = [p.grad for p in runner.parameters]
    assert all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(after, before, strict=True)
    )
    again = [runner.step(inputs, targets) for _ in range(2)]
    dist.all_reduce(torch.ones(1))
    losses = {round(loss.item(), 9) for loss in (*first, *again)}
    return [*said, str(len(losses))]


OF_LOSS = ("loss", "several", "detached", "nan", "-3", "alone")
FAILURES = [  # place, kind of error, what is said
    ("forward", "RuntimeError", r"F1, stage 1: FloatingPointError: it overflowed"),
    ("backward", "ValueError", r"the gradient is bad"),
    ("weight", "RuntimeError", r"ZeroDivisionError: no scale"),
    ("loss", "RuntimeError", r"KeyError: 'no such label'"),
    ("several", "ValueError", r"one number each"),
    ("sparse", "ValueError", r"a message is a dense tensor"),
    ("mute", "RuntimeError", r"stage 1: Mute: an error whose text raises KeyError"),
    ("detached", "ValueError", r"a sum that is detached"),
    ("nan", "ValueError", r"a count of nan"),
    ("-3", "ValueError", r"a count of -3"),
    ("alone", "ValueError", r"needs to return (sum, count)"),
]


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.agreement:sums_of_all",
    "xtrain.pipeline_parallel.failure:StepFailure",
)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_fails_on_one_rank_is_said_by_all_and_the_next_step_works(
    world, name, steps_before
):
    """In the first step, in which shapes are negotiated, and in a later one."""
    for place, kind, words in FAILURES:
        if name != "gpipe" and FAILURES.index((place, kind, words)) > 3:
            continue
        if place == "sparse" and world(4).device == "xgpu":
            continue  # has dense tensors only
        results = world(4).run(fails_and_goes_on, name, place, steps_before)
        first = results[0]
        for found in results:
            assert found == first, place
        assert first[0] == kind, (place, first)
        assert "rank" in first[1], first
        assert "stage" in first[1], first
        for part in words.split("|"):
            assert part in first[1], first
        assert first[2] == "1", place


@pytest.mark.verifies("xtrain.pipeline_parallel.message_header:check_sendable")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_whose_output_changes_for_the_same_input_is_named(world, name):
    for place, now in (("shape", "[2, 5] float64"), ("dtype", "[2, 6] float32")):
        for found in world(4).run(fails_and_goes_on, name, place, 2):
            kind, words, losses = found
            assert kind == "ValueError", found
            assert "rank 1: 1F" in words, found
            assert f"stage 1: returned {now} with a gradient, but [2, 6]" in words
            assert losses == "1"


def fails_beside_another_pipeline(wrapped: bool) -> str:
    """Ranks 0 and 1 are a pipeline, 2 and 3 another; a stage fails on rank 3."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    group, data_group = groups[rank // 2], groups[2 + rank % 2]
    schedule = make("one_f_one_b", 2, 3)
    traps = [Trap(module) for module in layers(2)]
    module: nn.Module = traps[rank % 2]
    if wrapped:
        module = DistributedDataParallel(
            module, process_group=data_group, gradient_reduction="sum"
        )
    runner = PipelineRunner(
        PipelineStage(module, rank % 2, 2), schedule, squares, group,
        data_group=data_group,
    )  # fmt: skip
    inputs, targets = batch(7, seed=rank // 2)
    before = runner.step(inputs, targets)
    if rank == 3:
        traps[1].set("forward", 2)
    said = ""
    try:
        runner.step(inputs, targets)
    except RuntimeError as error:
        said = str(error)
    for parameter in runner.parameters:
        parameter.grad = None
    assert torch.equal(runner.step(inputs, targets), before)
    return said


@pytest.mark.parametrize("wrapped", [False, True])
def test_other_pipelines_of_the_data_group_raise_as_well(world, wrapped):
    for said in world(4).run(fails_beside_another_pipeline, wrapped):
        assert said == "rank 3: 1F1, stage 1: FloatingPointError: it overflowed"


# ------------------------------------------------------------------------- bad input


def with_actions(*orders: str) -> Schedule:
    return Schedule("mine", 2, 2, 1, "loop", tuple(map(parse_actions, orders)))


ALL = (0, 1)
BAD_RUNNERS = {  # on which ranks of 1F1B, what they pass instead, the error
    "other stage": (
        [1], lambda m: {"stages": PipelineStage(m[0], 0, 2)},
        r"rank 1 has stages \[0\], but needs \[1\]"),
    "other count": (
        [1], lambda m: {"stages": PipelineStage(m[1], 1, 3)},
        r"cut into \[3\], but one_f_one_b has 2"),
    "too many": (
        [0], lambda m: {"stages": [PipelineStage(m[s], s, 2) for s in (0, 1)]},
        r"rank 0 has stages \[0, 1\], but needs \[0\]"),
    "no stage": (
        [0], lambda m: {"stages": m[0]},
        "rank 0: stages hold Layer, not PipelineStage"),
    "other schedule": (
        [1], lambda m: {"schedule": make("gpipe", 2, 2)},
        "schedule is 'one_f_one_b of 2 .* and 'gpipe of 2"),
    "other m": (
        [1], lambda m: {"schedule": make("one_f_one_b", 2, 3)},
        "schedule is 'one_f_one_b of 2 ranks and 2 .* 3 micro-batches"),
    "other ranks": (
        ALL, lambda m: {"schedule": make("one_f_one_b", 3, 2)},
        "the schedule is for 3 ranks, but the group has 2"),
    "incomplete": (
        [1], lambda m: {"schedule": with_actions("0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1")},
        "1BW?1 is done 0 times|1B1 is done 0 times"),
    "waits": (
        [0],
        lambda m: {"schedule": with_actions("0F0 0BW0 0F1 0BW1", "1F1 1F0 1BW0 1BW1")},
        "rank 0: mine: "),
    "messages": (
        [0], lambda m: {"schedule": with_messages(make("one_f_one_b", 2, 2))},
        "computations only"),
    "no schedule": (
        [0], lambda m: {"schedule": "gpipe"}, "the schedule is str, not a Schedule"),
    "no loss": ([0], lambda m: {"loss_fn": None}, "loss_fn is NoneType"),
}  # fmt: skip


def bad_runner(what: str) -> None:
    rank, schedule, modules = dist.get_rank(), make("one_f_one_b", 2, 2), layers(2)
    call = {"stages": own(modules, schedule, rank), "schedule": schedule}
    ranks, changes, _ = BAD_RUNNERS[what]
    if rank in ranks:
        call |= changes(modules)
    PipelineRunner(**{"loss_fn": squares} | call)


@pytest.mark.verifies(
    "xtrain.pipeline_parallel.checks:check_schedule",
    "xtrain.pipeline_parallel.checks:check_stages",
)
def test_stages_and_schedules_that_do_not_fit_are_refused_on_every_rank(world):
    for what, (_, _, match) in BAD_RUNNERS.items():
        expect_error(world(2), bad_runner, what, match=match)


def bad_batches() -> dict[str, str]:
    """The error of `step` for each bad batch, before anything but numbers is sent."""
    rank = dist.get_rank()
    schedule = make("one_f_one_b", 2, 4)
    runner = PipelineRunner(own(layers(2), schedule, rank), schedule, squares)
    x, y = batch(8)
    cases = {
        "no inputs": (None, y), "no targets": (x, None), "few rows": (x[:3], y[:3]),
        "few targets": (x, y[:7]), "dict": ({"x": x}, y), "number": (3, y),
        "list of numbers": ([1.0, 2.0], y), "empty": ((), y), "0 dims": (x.sum(), y),
        "uneven tuple": ((x, x[:6]), y), "gradient": (x.clone().requires_grad_(), y),
    }  # fmt: skip
    found = {}
    for name, (inputs, targets) in cases.items():
        with CommLedger() as ledger:
            try:
                runner.step(inputs, targets)
                found[name] = "nothing was raised"
            except ValueError as error:
                found[name] = str(error)
        if [e for e in ledger.events if e.kind == "send" and (e.nbytes or 0) > 256]:
            found[name] = "something was sent"
    try:
        with torch.inference_mode():
            runner.step(x, y)
    except ValueError as error:
        found["inference mode"] = str(error)
    assert runner.step(x, y) == runner.step(x, y)
    return found


BAD_BATCHES = {
    "no inputs": "rank 0: this rank needs inputs, but has None",
    "no targets": "rank 1: this rank needs targets, but has None",
    "few rows": "have 3 rows, fewer than the 4 micro-batches",
    "few targets": "inputs and targets have 7 to 8 rows: all must have as many",
    "dict": "rank 0: inputs are dict, not a tensor or a tuple of tensors",
    "number": "rank 0: inputs are int",
    "list of numbers": "rank 0: inputs hold float, not tensors only",
    "empty": "rank 0: inputs are an empty tuple",
    "0 dims": "rank 0: inputs hold a tensor of 0 dimensions",
    "uneven tuple": "rank 0: inputs have [6, 8] rows",
    "gradient": "rank 0: inputs require a gradient",
    "inference mode": "inside torch.inference_mode() computes no gradients",
}


@pytest.mark.verifies("xtrain.pipeline_parallel.checks:check_batch")
def test_a_bad_batch_is_refused_on_every_rank_before_anything_is_sent(world):
    for found in world(2).run(bad_batches):
        for name, words in BAD_BATCHES.items():
            assert words in found[name], name


# -------------------------------------------------------------------- a rank is lost

GONE, STOPPED = signal.SIGKILL, signal.SIGSTOP
LOST = [  # schedule, which of 4 ranks ends itself, at which of its calls of what, how
    ("one_f_one_b", 2, 3, "forward", "gloo", GONE),
    ("gpipe", 0, 8, "backward", "gloo", GONE),  # the last: others wait for the sums
    ("dualpipe", 1, 4, "backward", "gloo", GONE),
    ("zb_v", 2, 5, "backward", "xtrain-shm", GONE),
    ("one_f_one_b", 2, 3, "forward", "gloo", STOPPED),
    ("zb_v", 0, 5, "backward", "gloo", STOPPED),
    ("zb_v", 1, 3, "forward", "xtrain-shm", STOPPED),
]


def ends_itself(
    rank: int,
    path: str,
    name: str,
    lost: int,
    calls: int,
    place: str,
    backend: str = "gloo",
    how: signal.Signals = GONE,
):
    """A process that is one rank of four; it writes its error into a file."""
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.FileStore(f"{path}/store", 4)
    # Under 1F1B the rank's neighbours time out and end: others see connections close.
    soon = how is STOPPED and (name != "one_f_one_b" or abs(rank - lost) == 1)
    limit = timedelta(seconds=15 if soon else 100)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=4, timeout=limit
    )
    runner, traps = trapped(name)
    inputs, targets = batch(16)
    runner.step(inputs, targets)

    def end(*_: object) -> None:
        traps[lost].left -= 1
        if traps[lost].left == 0:
            os.kill(os.getpid(), how)

    if rank == lost:
        traps[lost].left = calls
        if place == "forward":
            traps[lost].register_forward_pre_hook(end)
        else:
            traps[lost].register_full_backward_pre_hook(end)
    try:
        runner.step(inputs, targets)
    except RankLost as error:
        with open(f"{path}/{rank}", "w") as file:
            file.write(str(error))
    os._exit(0)


@pytest.mark.parametrize("case", LOST, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_that_is_killed_ends_all_others_with_its_name(tmp_path, case):
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=ends_itself, args=(rank, str(tmp_path), *case))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        if (rank, STOPPED) != (case[1], case[-1]):
            process.join(90.0)
    stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    lost, how = case[1], case[-1]
    assert stuck == ([lost] if how is STOPPED else [])
    assert ranks[lost].exitcode == -signal.SIGKILL
    late = how is STOPPED and case[-2] == "gloo"  # which does not watch processes
    verb = "does not answer" if late else "is lost"
    for rank in {0, 1, 2, 3} - {lost}:
        said = (tmp_path / str(rank)).read_text()
        assert said.startswith(f"rank {lost} {verb}: rank {rank} was at "), said
        assert len(said) <= 200, said


# ------------------------------------------ a stage fails while its tensor ranks wait


class Together(nn.Module):
    """A stage whose forward waits for its tensor ranks."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.layer, self.group, self.calls = nn.Linear(4, 4), group, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4 and dist.get_rank() == 1:  # in the second step
            raise ValueError("a bad batch")
        dist.all_reduce(torch.ones(1), group=self.group)
        return self.layer(x)


def fails_alone(rank: int, path: Path, limit: float, together: Barrier) -> None:
    """Ranks 0 and 1 are stage 0, ranks 2 and 3 are stage 1; rank 1 fails."""
    store = dist.FileStore(f"{path}/store", 4)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=limit)
    )
    mesh = init_mesh((2, 2), ("pipeline", "tensor"))
    stage = PipelineStage(Together(mesh["tensor"].get_group()), rank // 2, 2)
    runner = PipelineRunner(
        stage,
        make("one_f_one_b", 2, 2),
        lambda y, target: ((y - target).square().sum(), y.numel()),
        mesh["pipeline"].get_group(),
    )
    x = torch.ones(4, 4)
    runner.step(x, x)
    began = time.monotonic()
    try:
        runner.step(x, x)
    except (ValueError, RankLost) as error:
        text = f"{time.monotonic() - began}\n{type(error).__name__}: {error}"
        (path / f"{rank}.said").write_text(text)
    together.wait(60.0)  # one that ends would be noticed sooner
    os._exit(0)


def test_a_stage_that_fails_among_tensor_ranks_is_named_after_one_timeout(tmp_path):
    fork, limit = multiprocessing.get_context("fork"), 6.0
    together = fork.Barrier(4)
    ranks = [
        fork.Process(target=fails_alone, args=(rank, tmp_path, limit, together))
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60.0)
        process.kill()
    for rank in range(4):
        seconds, said = (tmp_path / f"{rank}.said").read_text().split("\n", 1)
        assert float(seconds) < 1.8 * limit, (rank, seconds)  # two timeouts were 12
        assert said.startswith("RankLost: rank 1 failed: 0F1, stage 0: a bad"), said
