"""Lecture 7: a mixture of experts, against loops and against transformers.

    masked loop    expert by expert: its tokens are looked up, computed, added
    ours           MoE, which chooses its way by size
    transformers   Mixtral's block, with both ways of its experts
    on ranks       GShardMoE with half of the tokens and experts on each of two

All but the last on one thread of rank 0. `size` is that of all tokens in bytes.

The overlapped block runs the forward of one micro-batch and the backward of another.
Its network is gloo with a delay, so that communication takes about as long as compute
on any machine.
"""

from functools import partial

from xtrain.bench.expert_trials import (
    MOE_TOLERANCE,
    Layer,
    Sizes,
    layer_trial,
    masked_loop,
    moe_in_float64,
    ours,
    pair_trial,
    sharded_trial,
    transformers_block,
)
from xtrain.bench.race import Contestant, Goal, Race

TITLE = "Lecture 7: a mixture of experts"

NARROW, WIDE = Sizes(64, 128), Sizes(256, 512)
FEW, MANY = NARROW.bytes_of(256), WIDE.bytes_of(2048)
PAIR_SIZES, PAIR_EXPERTS, LATENCY = Sizes(256, 512), 8, 10e-3
PAIR = PAIR_SIZES.bytes_of(1024)

LOOP, OURS = "masked loop", "ours"
EAGER, GROUPED = "transformers, eager", "transformers, grouped_mm"
THEIRS = GROUPED, OURS, EAGER
LAYERS: dict[str, Layer] = {
    LOOP: masked_loop,
    OURS: ours,
    EAGER: partial(transformers_block, "eager"),
    GROUPED: partial(transformers_block, "grouped_mm"),
}


def layer_race(
    name: str, sizes: Sizes, size: int, contestants: tuple[str, ...], least: float
) -> Race:
    """One layer on one thread; the first of the contestants is the baseline."""
    ways = {who: LAYERS[who] for who in contestants}
    return Race(
        name,
        f"{size // sizes.bytes_of(1)} tokens, against {contestants[0]}",
        tuple(Contestant(w, partial(layer_trial, m, sizes)) for w, m in ways.items()),
        sizes=(size,),
        ranks=(1,),
        reference=partial(moe_in_float64, sizes),
        tolerance=MOE_TOLERANCE,
        goals=(Goal(OURS, least, size, 1),),
    )


def sharded_race() -> Race:
    """Experts on two ranks, against all experts on one thread."""
    return Race(
        "expert_ranks",
        "Experts on ranks",
        (
            Contestant("one process", partial(layer_trial, ours, WIDE)),
            Contestant("GShardMoE", partial(sharded_trial, WIDE)),
        ),
        sizes=(MANY,),
        ranks=(2,),
        reference=partial(moe_in_float64, WIDE),
        tolerance=MOE_TOLERANCE,
    )


def pair_race() -> Race:
    """A block with its all-to-alls in the open, and under compute."""
    sides = {"one after the other": False, "overlapped": True}
    return Race(
        "overlap",
        "Overlap",
        tuple(
            Contestant(
                who, partial(pair_trial, together, PAIR_EXPERTS, LATENCY, PAIR_SIZES)
            )
            for who, together in sides.items()
        ),
        sizes=(PAIR,),
        ranks=(2,),
        tolerance=MOE_TOLERANCE,
        goals=(Goal("overlapped", 1.2, PAIR, 2),),
    )


RACES = [
    layer_race("loop_few", NARROW, FEW, (LOOP, OURS), 2.2),
    layer_race("loop_many", WIDE, MANY, (LOOP, OURS), 1.05),
    layer_race("transformers_few", NARROW, FEW, THEIRS, 1.0),
    layer_race("transformers_many", WIDE, MANY, THEIRS, 1.0),
    sharded_race(),
    pair_race(),
]
