"""Stages on several data ranks under every wrapper, against one process."""

import pytest

from tests.pipeline_parallel.data_training import (
    Layout,
    OneProcess,
    Training,
    largest_error,
)

WRAPPERS = "plain", "ddp", "zero 1", "zero 2", "fsdp", "fsdp kept"
SCHEDULES = "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "dualpipe"
STEPS = 3
RUNNER = (
    "xtrain.pipeline_parallel.runner:PipelineRunner",
    "xtrain.pipeline_parallel.stage:PipelineStage",
)


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
    check(world, [Layout(wrapper, schedule) for schedule in SCHEDULES])
