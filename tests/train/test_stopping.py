"""A run that is told to stop, and one that fails: what is saved, what is written."""

import signal

import pytest
import torch.distributed as dist

from tests.train.test_run import close, curve, kept, recipe
from xtrain.checkpoint import latest
from xtrain.comm.flight_recorder_files import read_dumps
from xtrain.comm.flight_recorder_report import diagnose
from xtrain.plan import Layout
from xtrain.testing import World
from xtrain.train.recipe_parts import Log
from xtrain.train.run import TrainingRun, train

pytestmark = pytest.mark.processes("signals reach processes")
LAYOUTS = [Layout(data=2, zero=3), Layout(pipeline=2, micro_batches=2)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(f"line {n % 7}: {n * n}" for n in range(300)))
    return str(path)


def in_step(number, action, made):
    """Run with something that happens on the last rank within a step."""
    whole = TrainingRun.train_step

    def train_step(self, batch):
        if self.step + 1 == number and dist.get_rank() == dist.get_world_size() - 1:
            action()
        return whole(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "train_step", train_step)
        result = train(made)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return result


def told_to_stop():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.verifies("xtrain.train.stopping:Stopping", "xtrain.train.run:train")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_that_is_told_to_stop_loses_no_step(
    world, text, tmp_path, layout, background
):
    expected = curve(recipe(text, steps=6))[0]
    checkpoints = kept(tmp_path / "run", background=background)
    made = recipe(text, steps=6, layout=layout, checkpoint=checkpoints)
    for result in world(2).run(in_step, 4, told_to_stop, made):
        assert (result.step, result.stopped) == (4, True)
        assert close(result.losses, expected[:4])
    assert latest(tmp_path / "run").name.endswith("4")
    for losses, _ in world(2).run(curve, made):
        assert close(losses, expected[4:])


@pytest.mark.verifies("xtrain.train.stopping:Stopping")
def test_in_the_last_step_there_is_nothing_to_stop(world, text, tmp_path):
    made = recipe(text, steps=2, layout=LAYOUTS[0], checkpoint=kept(tmp_path / "run"))
    for result in world(2).run(in_step, 2, told_to_stop, made):
        assert (result.step, result.stopped) == (2, False)


def fails():
    raise ArithmeticError("a number of rank 1")


@pytest.mark.verifies("xtrain.train.run:recording")
def test_a_run_that_fails_leaves_the_last_calls_of_each_rank(text, tmp_path):
    folder = tmp_path / "calls"
    made = recipe(text, layout=LAYOUTS[0], log=Log(flight_recorder=str(folder)))
    with World(2) as fresh, pytest.raises(Exception, match="a number of rank 1"):
        fresh.run(in_step, 3, fails, made)
    report = str(diagnose(read_dumps([folder])))
    assert "ArithmeticError: a number of rank 1" in report
