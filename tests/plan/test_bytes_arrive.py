"""What ranks send arrives: transfers of drawn layouts, played message by message.

Nothing here knows a closed form. A collective is played on pieces of its tensor, each
rank with a set of whose numbers it has added up, and counts as done when all have what
it is to give. Both ends of every message are counted.
"""

import random
from collections.abc import Iterator
from functools import cache
from math import prod

import pytest

from xtrain.plan import Layout, ModelShape, Transfer, traffic_per_step
from xtrain.plan.context_parallel import WAYS
from xtrain.plan.layout import CHUNKS, SCHEDULE_NAMES
from xtrain.plan.layout_rules import broken_rules
from xtrain.plan.transfer import spans_of
from xtrain.schedules import SCHEDULES, with_messages

LEGAL = 100  # layouts of each shape
MOST = 64  # devices of a pipeline rank: rings are played piece by piece
SHAPES = {
    "llama-3-8b": ModelShape.preset("llama-3-8b"),
    "odd": ModelShape(
        vocab_size=30_030, hidden_size=1155, intermediate_size=2310, head_dim=34,
        num_hidden_layers=13, num_attention_heads=30, num_key_value_heads=6,
        tie_word_embeddings=True,
    ),
    "mixtral-8x7b": ModelShape.preset("mixtral-8x7b"),
    "deepseek-v3": ModelShape.preset("deepseek-v3"),
}  # fmt: skip

Message = tuple[int, int, int]
"""Source, target, bytes."""
Held = list[list[set[int]]]
"""Of each rank and piece, the ranks whose numbers are in it."""


def pieces(size: int, ranks: int) -> list[int]:
    """As equal as whole bytes can be."""
    return [size // ranks + (rank < size % ranks) for rank in range(ranks)]


def pass_around(held: Held, cut: list[int], first: int) -> Iterator[Message]:
    """Each rank sends its neighbour a piece, ranks - 1 times; adds up what it has.

    Args:
        first: rank r begins with piece r + first, and goes on with the one before.
    """
    ranks = len(held)
    for step in range(ranks - 1):
        sent = [(rank, (rank + first - step) % ranks) for rank in range(ranks)]
        on_the_way = [set(held[rank][piece]) for rank, piece in sent]
        for (rank, piece), numbers in zip(sent, on_the_way, strict=True):
            held[(rank + 1) % ranks][piece] |= numbers
            yield rank, (rank + 1) % ranks, cut[piece]


def messages(algorithm: str, size: int, ranks: int) -> list[Message]:
    """All messages of one collective on a tensor of `size` bytes, or one of each rank.

    AssertionError unless every rank then has what the collective is to give it.
    """
    every, cut = set(range(ranks)), pieces(size, ranks)
    own: Held = [[{rank} for _ in every] for rank in every]
    if algorithm == "send":  # each to the next; a pair of stages has one direction
        return [(rank, (rank + 1) % ranks, size) for rank in every]
    if algorithm == "ring_reduce_scatter":
        found = list(pass_around(own, cut, -1))
        assert all(own[rank][rank] == every for rank in every)
    elif algorithm == "ring_all_reduce":
        found = list(pass_around(own, cut, 0))
        found += pass_around(own, cut, 1)
        assert all(piece == every for rank in own for piece in rank)
    elif algorithm == "ring_all_gather":
        own = [
            [{rank} if rank == piece else set() for piece in every] for rank in every
        ]
        found = list(pass_around(own, cut, 0))
        assert all(own[rank][piece] == {piece} for rank in every for piece in every)
    else:
        whole = {"one_shot_all_reduce": [size] * ranks, "all_to_all": cut}[algorithm]
        pairs = [(rank, other) for rank in every for other in every if rank != other]
        found = [(rank, other, whole[other]) for rank, other in pairs]
    return found


@cache
def both_ends(algorithm: str, size: int, ranks: int) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends and receives."""
    sent, received = [0] * ranks, [0] * ranks
    for source, target, nbytes in messages(algorithm, size, ranks):
        sent[source] += nbytes
        received[target] += nbytes
    return sent, received


def drawn(draw: random.Random) -> tuple[Layout, int]:
    """Any layout, legal or not, and a sequence."""
    few, sizes = (1, 1, 2, 3), (1, 1, 2, 3, 4, 5, 6, 8)
    schedule = draw.choice(SCHEDULE_NAMES)
    expert = draw.choice((*few, 4, 8))
    tensor, zero = draw.choice((*sizes, 16)), draw.choice(range(4))
    layout = Layout(
        data=expert * draw.choice(sizes), tensor=tensor, expert=expert,
        pipeline=draw.choice((1, 2, 3, 4)), context=draw.choice(few),
        zero=zero, replicate=draw.choice(few) if zero else 1,
        sequence_parallel=draw.random() < 0.5, micro_batch=draw.choice(few),
        micro_batches=draw.choice((2, 4, 6, 8, 9, 12)), schedule=schedule,
        chunks=CHUNKS.get(schedule, 1) or draw.choice((2, 3)),
        recompute=draw.choice(("none", "selective", "full")),
        context_way=draw.choice(WAYS), shard_context=draw.random() < 0.3,
        reshard_after_forward=draw.random() < 0.7,
        reduce_at_end=zero == 2 and draw.random() < 0.5,
        expert_tensor=1 if expert > 1 and draw.random() < 0.3 else None,
    )  # fmt: skip
    return layout, draw.choice((24, 120, 840, 4096))


def legal_layouts(shape: ModelShape, seed: int) -> list[tuple[Layout, int]]:
    draw, found = random.Random(seed), dict[tuple[Layout, int], None]()
    while len(found) < LEGAL:
        layout, sequence = drawn(draw)
        if layout.gpus > MOST * layout.pipeline:
            continue
        if not broken_rules(shape, layout, sequence, sharded_pipeline=True):
            found[layout, sequence] = None
    return list(found)


def all_transfers(
    shape: ModelShape, layout: Layout, sequence: int
) -> list[list[Transfer]]:
    """Of a device of each pipeline rank."""
    return [
        traffic_per_step(shape, layout, sequence, rank=rank)
        for rank in range(layout.pipeline)
    ]


def check_places(layout: Layout, transfer: Transfer) -> None:
    """Its ranks stand where it says, are all there, and such groups fill the mesh."""
    spans = transfer.spans
    if spans is None:
        spans = spans_of(layout, transfer)
    assert prod(count for _, count in spans) == transfer.ranks, (layout, transfer)
    whole = layout.gpus if transfer.axis != "pipeline" else 2
    assert whole % transfer.ranks == 0, (layout, transfer)


PLACED = {  # copies that do not divide the ranks of an expert; experts folded
    "5 ranks in 2 copies": Layout(data=10, expert=2, zero=1, replicate=2),
    "folded": Layout(data=4, tensor=2, context=2, expert=4, expert_tensor=1, zero=1),
}


@pytest.mark.verifies("xtrain.plan.transfer:spans_of")
@pytest.mark.parametrize("layout", PLACED.values(), ids=PLACED)
def test_gradients_of_experts_are_summed_where_they_are(layout: Layout) -> None:
    """Each is legal, and its expert ranks' gradients are summed over all copies."""
    shape = SHAPES["mixtral-8x7b"]
    assert not broken_rules(shape, layout, 24)
    for transfer in traffic_per_step(shape, layout, 24):
        check_places(layout, transfer)


@pytest.mark.verifies(
    "xtrain.plan.transfer:Transfer",
    "xtrain.plan.transfer:transfer_cost",
    "xtrain.plan.transfer:spans_of",
)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_sent_arrives(name: str) -> None:
    uneven, seen = 0, set()
    for layout, sequence in legal_layouts(SHAPES[name], seed=len(name)):
        for transfers in all_transfers(SHAPES[name], layout, sequence):
            for one in transfers:
                sent, received = both_ends(one.algorithm, one.size, one.ranks)
                assert sum(sent) == sum(received)
                assert one.times * sum(sent) == one.ranks * one.sent, (layout, one)
                check_places(layout, one)
                uneven += one.size % one.ranks > 0
                seen.add((one.axis, one.algorithm))
    assert uneven > 50
    assert {axis for axis, _ in seen} >= {"tensor", "context", "pipeline", "data"}
    if SHAPES[name].num_key_value_heads == 8:  # on 16 tensor ranks
        assert ("tensor", "one_shot_all_reduce") in seen


@cache
def of_schedule(name: str, ranks: int, count: int, chunks: int) -> list[list[int]]:
    """How many SEND_F, SEND_B, RECV_F and RECV_B each rank has."""
    sizes = (ranks, count, chunks) if name == "interleaved" else (ranks, count)
    schedule = with_messages(SCHEDULES[name](*sizes))
    kinds = "SEND_F", "SEND_B", "RECV_F", "RECV_B"
    return [
        [sum(action.kind == kind for action in actions) for kind in kinds]
        for actions in schedule.actions
    ]


@pytest.mark.verifies("xtrain.plan.step_traffic:pipeline_transfers")
@pytest.mark.parametrize("name", SHAPES)
def test_stages_send_what_the_schedule_lists(name: str) -> None:
    """Each activation that leaves a rank reaches one, and its gradient comes back."""
    piped = 0
    for layout, sequence in legal_layouts(SHAPES[name], seed=len(name)):
        size = layout.pipeline, layout.micro_batches, layout.chunks
        listed = of_schedule(layout.schedule, *size)
        planned = []
        for transfers in all_transfers(SHAPES[name], layout, sequence):
            own = [
                one
                for one in transfers
                if one.axis == "pipeline" and one.what != "shared gradients"
            ]
            times = {one.backward: one.times for one in own}
            planned.append([times.get(False, 0), times.get(True, 0)])
        assert planned == [counts[:2] for counts in listed], layout
        forward, backward, *arrived = map(sum, zip(*listed, strict=True))
        assert [forward, backward] == arrived and forward == backward
        piped += layout.pipeline > 1
    assert piped > 30
