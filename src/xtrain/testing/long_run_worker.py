"""A test process of a `LongRun`: a plugin of pytest."""

import time
from typing import Any

import pytest

from xtrain.evidence.forecast import NOTHING_KNOWN


def plan_of(config: pytest.Config) -> Any:
    """What this process was told to leave out, to run first, and when to end."""
    return getattr(config, "workerinput", {}).get("plan")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Drop what has passed; order what is left."""
    if plan := plan_of(config):
        done, order = set(plan["done"]), plan["order"]
        unknown = NOTHING_KNOWN.order, NOTHING_KNOWN.ranks
        left = [item for item in items if item.nodeid not in done]
        items[:] = sorted(left, key=lambda item: order.get(item.nodeid, unknown))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Start no further test when the time is over."""
    plan = plan_of(item.config)
    if plan and time.time() > plan["until"]:
        item.session.shouldstop = "the time is over"
