"""The page on congestion: its runs are its formulas."""

import pytest

from xtrain.cluster.topology import NETWORK_LATENCY
from xtrain_docs import runs
from xtrain_docs.lectures.cluster import all_to_all as page
from xtrain_docs.lectures.cluster import all_to_all_runs as ran


@pytest.fixture
def here(monkeypatch):
    """Runs happen in this process: their ranks are threads of it."""
    monkeypatch.setattr(runs, "remembered", lambda fn, ranks, *args: [fn(*args)])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("way", page.ORDERS)
@pytest.mark.usefixtures("here")
def test_three_orders_take_what_their_formulas_say(way, ranks):
    took = page.exchange_seconds(way, "nvlink", ranks)
    assert took == pytest.approx(page.exchange_formula(way, ranks), rel=1e-9)


@pytest.mark.parametrize("topology", ["nvlink", "dgx_h100", "fat_tree(leaf=1)"])
@pytest.mark.usefixtures("here")
def test_many_messages_and_one_flow_take_as_long(topology):
    one_flow = page.exchange_seconds("torch", topology, 16)
    messages = page.exchange_seconds("all at once", topology, 16)
    assert messages == pytest.approx(one_flow, rel=1e-9)


@pytest.mark.parametrize(
    ("over", "hot", "size", "stride"),
    [(1.0, 1.0, 64, 1), (4.0, 1.0, 64, 1), (4.0, 1.0, 16, 4), (4.0, 1.0, 16, 1),
     (1.0, 8.0, 64, 1)],
)  # fmt: skip
@pytest.mark.verifies("xtrain.cluster.topology:fat_tree")
@pytest.mark.usefixtures("here")
def test_a_dispatch_takes_what_its_busiest_link_needs(
    monkeypatch, over, hot, size, stride
):
    monkeypatch.setattr(ran, "TOKENS", 512)
    monkeypatch.setattr(page, "TOKENS", 512)
    found = page.dispatch_of(over, hot, size, stride)
    monkeypatch.setattr(page, "dispatch_of", lambda *asked: found)
    busiest = NETWORK_LATENCY + page.fullest_link(over, hot, size, stride)
    # groups of one cluster do not share all links all the time
    assert page.dispatch_seconds(over, hot, size, stride) == pytest.approx(
        busiest, rel=1e-4 if size == ran.RANKS else 0.01
    )
    if hot == 1.0:
        uniform = page.dispatch_formula(over, size, stride)
        assert uniform < busiest < 1.08 * uniform
    else:
        assert page.received_over_mean(hot) > 2


def test_shares_that_leave_a_block():
    assert page.far(64, 1, 8) == 1 - 8 / 64
    assert page.far(16, 4, 8) == 1 - 2 / 16
    assert page.far(16, 4, 16) == 1 - 4 / 16
    assert page.far(16, 1, 16) == 0.0
    assert page.far(8, 16, 8) == 1 - 1 / 8


@pytest.mark.usefixtures("here")
def test_all_messages_come_to_one_rank_or_are_spread():
    most = {}
    for way in page.ORDERS:
        messages = page.run_of(way, "nvlink", page.PICTURED)["messages"]
        assert len(messages) == 8 * 7
        counts = [n for rank in range(8) for *_, n in page.under_way(messages, rank)]
        most[way] = max(counts)
    assert most == {"rank 0 first": 7, "next rank first": 1, "all at once": 7}
    drawing = page.arriving_messages()
    assert drawing.count(">7 messages to rank") == 1 + 8


def test_messages_under_way_are_counted_between_begins_and_ends():
    messages = [(0, 2, 0.0, 4.0), (1, 2, 1.0, 3.0), (0, 1, 0.0, 9.0), (1, 2, 5.0, 6.0)]
    assert list(page.under_way(messages, 2)) == [
        (0.0, 1.0, 1), (1.0, 3.0, 2), (3.0, 4.0, 1), (5.0, 6.0, 1),
    ]  # fmt: skip
