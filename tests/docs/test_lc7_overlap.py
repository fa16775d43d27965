"""The timelines and the table of the page on overlap are of real runs."""

import json

from xtrain_docs.lectures.lc7 import overlap


def test_messages_lie_under_compute_only_where_micro_batches_overlap(on_ranks):
    for kind, drawing in (
        ("pair", overlap.overlapped_block()),
        ("prefill", overlap.prefill_turns()),
    ):
        alone, together = (overlap.recorded(kind, how) for how in (False, True))
        assert len(alone["events"]) == len(together["events"])
        assert overlap.clock(kind, False) == alone["total"]
        for found, hidden in ((alone, False), (together, True)):
            kinds = [
                kind for _, chunk, kind, *_ in found["events"] if chunk != "counts"
            ]
            pairs = list(zip(kinds, kinds[1:], strict=False))
            assert (("issue", "compute") in pairs) == hidden
        computed = [e for e in together["events"] if e[2] == "compute"]
        boxes = [f"<title>{batch} {chunk}: " for batch, chunk, *_ in computed]
        assert all(drawing.count(box) >= 2 * boxes.count(box) for box in boxes)
        assert "Download both as a trace" in drawing


def test_the_trace_has_every_chunk_and_message(on_ranks):
    found = {"alone": overlap.recorded("pair", False)}
    events = json.loads(overlap.chrome_events(found))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    kinds = [kind for _, _, kind, *_ in found["alone"]["events"]]
    for lane, kind in enumerate(overlap.LANES):
        ours = [event for event in slices if event["tid"] == lane]
        assert len(ours) == kinds.count(kind) > 0
