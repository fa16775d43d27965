"""What a cluster records, and its pictures: checked against times by formula."""

import json
import os
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster import Deadlock, VirtualCluster, advance, dgx_h100, flat
from xtrain.cluster.chrome_trace import chrome_trace
from xtrain.cluster.draw import joined, timeline_svg
from xtrain.cluster.heat import busiest, heat_svg, load
from xtrain.cluster.recorder import COMPUTE, WAIT
from xtrain.comm import ring_all_reduce

ALPHA, BANDWIDTH = 1e-6, 1e9
NUMBERS = 1000  # of 4 bytes


def late_sender(rank: int, size: int) -> None:
    """Rank 0 computes 5 us and sends; rank 1 computes 2 us and waits for it."""
    tensor = torch.zeros(NUMBERS)
    advance(5e-6 if rank == 0 else 2e-6)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    advance(1e-6)


def overlapped(rank: int, size: int) -> None:
    tensor = torch.zeros(NUMBERS)
    work = dist.all_reduce(tensor, async_op=True)
    advance(3e-6)
    work.wait()
    advance(2e-6)


def ring(rank: int, size: int) -> None:
    advance(1e-6 * rank)
    ring_all_reduce(torch.zeros(NUMBERS))


def polls(rank: int, size: int) -> None:
    tensor = torch.zeros(NUMBERS)
    if rank == 0:
        work = dist.irecv(tensor, 1)
        while not work.is_completed():
            pass
        work.wait()
    else:
        advance(1e-4)
        dist.send(tensor, 0)


def recorded(program, size=2, topology=None, **options):
    topology = topology or flat(ALPHA, BANDWIDTH)
    cluster = VirtualCluster(size, topology, record=True, **options)
    cluster.run(program)
    return cluster.record


def shape_of(spans):
    return [
        (kind, pytest.approx(a, rel=1e-9), pytest.approx(b)) for kind, a, b in spans
    ]


@pytest.mark.verifies("xtrain.cluster.recorder:RunRecorder")
@pytest.mark.verifies("xtrain.cluster.recorder:RunRecord")
def test_time_of_each_rank_is_computed_or_waited():
    record = recorded(late_sender)
    arrived = 5e-6 + ALPHA + 4 * NUMBERS / BANDWIDTH
    assert [s[:3] for s in record.spans(0)] == shape_of(
        [(COMPUTE, 0, 5e-6), (WAIT, 5e-6, arrived), (COMPUTE, arrived, arrived + 1e-6)]
    )
    assert [s[:3] for s in record.spans(1)] == shape_of(
        [(COMPUTE, 0, 2e-6), (WAIT, 2e-6, arrived), (COMPUTE, arrived, arrived + 1e-6)]
    )
    assert "recv([1000] float32, src=0)" in record.waits[1][0].call
    assert "test_recorder.py:" in record.waits[1][0].call
    (message,) = record.transfers
    assert message[:3] == ("message", (0, 1), 4 * NUMBERS)
    assert (message.start, message.end) == pytest.approx((5e-6, arrived))
    assert record.total(1, WAIT) == pytest.approx(arrived - 2e-6)
    assert record.makespan == max(record.seconds)


@pytest.mark.parametrize("topology", [None, dgx_h100(1)], ids=["flat", "dgx"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("program", [late_sender, overlapped, ring, polls])
def test_spans_have_no_gap_and_messages_are_those_of_the_algorithm(
    program, seed, topology
):
    size = 4 if program is ring else 2
    record = recorded(program, size, topology, seed=seed)
    for rank in range(size):
        spans, clock = list(record.spans(rank)), 0.0
        for span in spans:
            assert span.start == clock < span.end
            clock = span.end
        assert clock == record.seconds[rank]
    messages = [one for one in record.transfers if one.kind == "message"]
    sent = sum(one.nbytes for one in messages)
    expected = {late_sender: 4 * NUMBERS, overlapped: 0, polls: 4 * NUMBERS}
    if program is ring:  # 2 (N - 1) / N of the tensor by each of N ranks
        sent = sum(one.nbytes for one in messages if one.nbytes == NUMBERS)
        assert sent == 2 * (size - 1) * 4 * NUMBERS
    else:
        assert sent == expected[program]


def test_compute_beside_a_collective_is_seen_as_overlap():
    record = recorded(overlapped)
    (collective,) = record.transfers
    assert collective.kind == "all_reduce" and list(collective.ranks) == [0, 1]
    compute, wait, after = record.spans(0)
    assert compute.kind == after.kind == COMPUTE
    assert collective.start == 0 and collective.end == wait.end == after.start
    assert wait.start == pytest.approx(3e-6)


def test_a_rank_that_asks_in_a_loop_has_one_wait():
    record = recorded(polls)
    (wait,) = record.waits[0]
    assert wait.end == record.seconds[0]


def test_links_have_the_bytes_and_the_busy_time_of_what_crossed_them():
    record = recorded(late_sender)
    assert list(record.links) == ["0 to 1"]
    use = record.links["0 to 1"]
    assert use == (BANDWIDTH, 4 * NUMBERS, pytest.approx(4 * NUMBERS / BANDWIDTH))
    record = recorded(late_sender, topology=dgx_h100(1))
    assert sorted(record.links) == ["gpu 0 up", "gpu 1 down"]
    use = record.links["gpu 0 up"]
    assert use.bytes == 4 * NUMBERS
    assert use.busy == pytest.approx(use.bytes / use.bandwidth, rel=1e-6)
    assert load(use, 2 * use.busy) == pytest.approx(0.5, rel=1e-6)
    assert busiest(record, 1)[0][0] in record.links


def test_collectives_count_on_the_links_of_pairs():
    record = recorded(overlapped, 4)
    (one,) = record.transfers
    assert one.nbytes == 4 * NUMBERS
    sent = [use.bytes for use in record.links.values()]
    assert max(sent) * 4 in (6 * one.nbytes, 4 * one.nbytes, 2 * one.nbytes)


def test_nothing_is_kept_when_it_is_off():
    cluster = VirtualCluster(2, flat(ALPHA, BANDWIDTH))
    cluster.run(late_sender)
    assert cluster.record is None and cluster.scheduler.recorder is None


def test_a_record_is_left_by_a_deadlock():
    def circle(rank: int, size: int) -> None:
        advance(2e-6)
        dist.recv(torch.zeros(1), 1 - rank)

    cluster = VirtualCluster(2, flat(ALPHA, BANDWIDTH), record=True)
    with pytest.raises(Deadlock):
        cluster.run(circle)
    assert cluster.record.seconds == [2e-6, 2e-6]


# ---------------------------------------------------------------------- pictures


def rects(svg: str, kind: str) -> list[ET.Element]:
    root = ET.fromstring(svg)
    found = root.iter("{http://www.w3.org/2000/svg}rect")
    return [one for one in found if one.get("class") == kind and len(one)]


@pytest.mark.verifies("xtrain.cluster.draw:timeline_svg")
def test_a_timeline_has_each_piece_at_its_place():
    record = recorded(late_sender)
    svg = timeline_svg(record, "A late sender", width=400)
    assert "A late sender: 2 ranks, 11 us" in svg
    scale = (400 - 52 - 10) / record.makespan
    assert "at test_recorder.py:" in svg and os.getcwd() not in svg
    drawn = rects(svg, "compute")
    assert len(drawn) == 4 and len(rects(svg, "wait")) == 2
    assert float(drawn[0].get("width")) == pytest.approx(5e-6 * scale, abs=0.01)
    (message,) = rects(svg, "message")
    assert float(message.get("x")) == pytest.approx(52 + 5e-6 * scale, abs=0.01)
    assert "message of 4 kB to rank 1: 5 us to 10 us" in message[0].text
    with pytest.raises(ValueError, match="rank 2 of a record of 2"):
        timeline_svg(record, ranks=[0, 2])
    assert "rank 1" not in re.findall(r'class="l"[^>]*>([^<]*)', timeline_svg(
        record, ranks=[0]
    ))  # fmt: skip


def test_many_short_pieces_make_a_small_picture():
    pieces = [(COMPUTE, n * 1e-3, n * 1e-3 + 5e-4, "a") for n in range(10_000)]
    assert len(joined(pieces, 0.1)) < 110
    far = [(COMPUTE, 0.0, 1.0, "a"), (COMPUTE, 2.0, 3.0, "b"), (WAIT, 3.0, 4.0, "c")]
    assert joined(far, 0.1) == far


@pytest.mark.verifies("xtrain.cluster.heat:heat_svg")
def test_a_heat_map_has_a_cell_for_each_link_and_the_darkest_is_the_busiest():
    for topology in (flat(ALPHA, BANDWIDTH), dgx_h100(2)):
        record = recorded(ring, 12, topology)
        svg = heat_svg(record)
        cells = rects(svg, "h")
        assert len(cells) == len(record.links)
        name, use, _ = busiest(record, 1)[0]
        darkest = max(cells, key=lambda cell: float(cell.get("fill-opacity")))
        assert float(darkest.get("fill-opacity")) == 1.0
        share = load(use, record.makespan)
        assert darkest[0].text.split(", load")[1][:4] in f" {100 * share:.2g} %"
        assert name in svg
    cluster = VirtualCluster(2, record=True)
    cluster.run(late_sender)
    with pytest.raises(ValueError, match="no link was crossed"):
        heat_svg(cluster.record)


@pytest.mark.verifies("xtrain.cluster.chrome_trace:chrome_trace")
def test_a_trace_has_a_track_a_rank_and_an_arrow_a_message():
    record = recorded(ring, 4)
    events = json.loads(chrome_trace(record))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    for rank in range(4):
        track = sorted(
            (e for e in slices if e["tid"] == rank), key=lambda event: event["ts"]
        )
        assert track[0]["ts"] == 0
        for one, following in pairwise(track):
            assert one["ts"] + one["dur"] == pytest.approx(following["ts"])
        last = track[-1]["ts"] + track[-1]["dur"]
        assert last == pytest.approx(1e6 * record.seconds[rank], abs=1e-3)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    messages = [t for t in record.transfers if t.kind == "message"]
    assert begins.keys() == ends.keys() and len(begins) == len(messages)
    for number, left in begins.items():
        arrived, one = ends[number], record.transfers[number]
        assert (left["tid"], arrived["tid"]) == tuple(one.ranks)
        assert left["ts"] < arrived["ts"] and arrived["bp"] == "e"
        for event in (left, arrived):
            assert any(
                piece["ts"] <= event["ts"] < piece["ts"] + piece["dur"]
                for piece in slices
                if piece["tid"] == event["tid"]
            )
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == [f"rank {rank}" for rank in range(4)]
