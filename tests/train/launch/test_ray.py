"""Ray on this machine runs the program it is given, where Ray is installed."""

import importlib.util

import pytest

from tests.train.launch.test_runs import Launched


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the package ray[train]"
)
@pytest.mark.verifies("xtrain.train.launch.ray:ray")
def test_ray_starts_workers_again_after_one_is_killed(tmp_path):
    """No usage statistics are sent, and no other cluster is looked for."""
    run = Launched(tmp_path, "ray", nodes=1)
    apart = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    with run.start(**apart) as process:
        assert process.wait(400) == 0
    assert run.killed.exists()
    run.check()
