"""A block's list of events."""

import pytest

from xtrain.expert_parallel.events import Event, event, exposed_seconds

EVENTS = "xtrain.expert_parallel.events"


@pytest.mark.verifies(f"{EVENTS}:event")
@pytest.mark.verifies(f"{EVENTS}:Event")
def test_what_is_done_becomes_an_event_where_there_is_a_list():
    events: list[Event] = []
    for target in (events, None):
        with event(target, "F", "mlp", "compute"):
            inside = len(events)
    (found,) = events
    assert inside == 1, "nothing is added without a list"
    assert found.name == "compute F mlp"
    assert found.begin <= found.end


@pytest.mark.verifies(f"{EVENTS}:exposed_seconds")
def test_only_waits_are_exposed():
    kinds = (("compute", 4.0), ("issue", 2.0), ("wait", 1.0), ("wait", 0.5))
    events = [Event("F", "mlp", kind, 10.0, 10.0 + took) for kind, took in kinds]
    assert exposed_seconds(events) == 1.5
