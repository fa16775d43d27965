"""A fixture for the runs whose results are those of gloo on CPUs."""

import pytest


@pytest.fixture
def on_gloo(xtrain_worlds):
    """Skip elsewhere: what blocks and what is held is that of gloo and of CPUs."""
    if xtrain_worlds.device != "cpu" or xtrain_worlds.backend not in (
        "gloo",
        "xtrain-virtual",
    ):
        pytest.skip("runs of gloo on CPUs")
