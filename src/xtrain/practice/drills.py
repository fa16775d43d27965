"""The drills: one for each whiteboard form, with the minutes that it is given.

The form is the solution, its header the task, its self-check the check; here stands
only what is not in them.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from xtrain.copying.forms import forms, header, same_name

LECTURES = {
    "comm": "lc1",
    "data_parallel": "lc2",
    "zero": "lc3",
    "tensor_parallel": "lc4",
    "schedules": "lc5",
    "pipeline_parallel": "lc5",
    "context_parallel": "lc6",
    "expert_parallel": "lc7",
    "train": "lc8",
}
GIVEN = """
    exchange                     5 1   broadcast                   10 2
    reduce                      10 2   gather                       6 1
    scatter                      6 1   ring_reduce_scatter         10 2
    ring_all_gather              8 2   ring_all_reduce             15 3
    tree_all_reduce             12 3   halving_doubling_all_reduce 20 4
    hierarchical_all_reduce     15 3   one_shot_all_reduce          6 1
    parameter_server_all_reduce  8 1   all_to_all_single           12 2

    naive_data_parallel          8 1   distributed_data_parallel   25 4
    distributed_sampler         12 2

    adamw                       15 2   clip_grad_norm               8 2
    mixed_precision             20 3   zero_1                      20 3
    zero_2                      25 4   fully_sharded               30 5
    fully_sharded_prefetch      25 5   muon                        25 4

    column_parallel_linear      15 2   row_parallel_linear         15 2
    sequence_parallel_region    25 4   tensor_parallel_attention   30 4
    tensor_parallel_mlp         20 3   vocab_parallel_cross_entropy 20 4
    vocab_parallel_embedding    15 3   rotary_embedding             8 2
    ring_all_gather_matmul      15 3   ring_matmul_reduce_scatter  15 3

    gpipe                        6 1   one_f_one_b                 10 2
    interleaved                 15 3   zb_h1                       12 3
    zb_h2                       15 3   zb_v                        25 5
    dualpipe                    30 5   dualpipe_v                  30 5
    chimera                     15 3   simulate                    20 3
    gpipe_step                  20 3   one_f_one_b_step            30 4
    checkpoint                  15 3   split_backward              25 4

    online_softmax              10 2   flash_attention_forward     15 3
    flash_attention_backward    20 4   ring_attention_forward      25 4
    ring_attention_backward     30 5   shard_sequence              10 2
    ulysses_attention           20 3   all_gather_attention        20 3
    decode_attention            12 3

    top_k_router                15 2   top_k_gradient              10 3
    expert_capacity             10 2   load_balancing_loss          8 2
    update_balance_bias          6 1   plan_placement              12 3
    dispatch                    12 3   combine                     10 2
    moe_forward                 12 2   moe_backward                20 4
    gshard_moe                  25 4   overlapped_all_to_all       15 3

    mesh_training_step          40 5
"""
"""Name, minutes, difficulty from 1 to 5."""


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill.

    Attributes:
        minutes: to write it, from a blank file.
        difficulty: from 1 to 5.
        path: of the whiteboard form, which is its solution.
    """

    name: str
    lecture: str
    minutes: int
    difficulty: int
    path: Path

    @property
    def folder(self) -> str:
        """The form's folder, as "comm"."""
        return self.path.parent.name

    @property
    def solution(self) -> str:
        """The text of the form."""
        return self.path.read_text(encoding="utf-8")

    @property
    def header(self) -> dict[str, str]:
        """What it computes, sends and leaves out."""
        return header(self.solution)


def drills() -> dict[str, Drill]:
    """All of them, by name, in the order of the lectures."""
    words, known = GIVEN.split(), forms()
    return {
        name: Drill(
            name, LECTURES[known[name].parent.name], int(minutes), int(hard),
            known[name],
        )
        for name, minutes, hard in zip(*(iter(words),) * 3, strict=True)
    }  # fmt: skip


def drill(name: str) -> Drill:
    """The one of that name; ValueError names the nearest."""
    known = drills()
    found = same_name(name, known)
    if found is None:
        close = get_close_matches(name, known, n=3, cutoff=0.4)
        nearest = f"nearest: {', '.join(close)}" if close else "see `xtrain drill list`"
        raise ValueError(f"there is no drill {name[:40]!r}; {nearest}")
    return known[found]
