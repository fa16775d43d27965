"""Shared by the tests of `xtrain.comm`."""

import pytest


@pytest.fixture
def gloo(xtrain_worlds):
    """Skip where the session runs another backend: the claim is about gloo."""
    if xtrain_worlds.backend != "gloo":
        pytest.skip(f"about gloo, the backend here is {xtrain_worlds.backend}")
