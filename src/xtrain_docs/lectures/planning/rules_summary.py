"""The rules of thumb in one table: what is said, a verdict, and the condition."""

from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, si, times, value
from .choosing import stage_name
from .rules import EXAMPLE, rule_ddp_limit, rule_longer
from .rules_parts import (
    IDLE,
    SEVERAL,
    rule_batches_for,
    rule_bubble,
    rule_example,
    rule_sequence_parallel,
    rule_states,
    rule_tensor_share,
    rule_volume,
)

HOLDS, CONDITION, WRONG = "holds", "holds with a condition", "wrong"
Row = tuple[str, str, str, str]
"""Part of the page, what is said, verdict, condition."""


def of_sizes() -> list[Row]:
    """Which parallelisms for which size."""
    limit = number(rule_ddp_limit(0, 8, "megatron18"), 2)
    few, many = (rule_longer("llama-2-13b", n, "data alone") for n in (8, 64))
    flat, deep = (
        rule_longer(model, gpus, "no pipeline")
        for model, gpus in ((EXAMPLE, 128), ("llama-3.1-405b", 512))
    )
    large = percent(rule_longer(EXAMPLE, 128, "data alone"))
    return [
        ("size", "Below 7B: one device, DDP or ZeRO-2", CONDITION,
         f"one device and DDP end below {limit} billion parameters on 80 GB"),
        ("size", "7B to 13B: ZeRO-3 or FSDP", CONDITION,
         f"with devices enough: 13B on 8 loses {percent(few)}, on 64 {percent(many)}"),
        ("size", "13B to 70B: tensor and data ranks", HOLDS,
         f"but data ranks alone lose only {large} for 70B on 128"),
        ("size", "70B and more: three dimensions", CONDITION,
         f"without a pipeline 70B on 128 loses {percent(flat)}, 405B on 512 "
         f"{percent(deep)}; 405B does not fit on data ranks alone"),
    ]  # fmt: skip


def of_links() -> list[Row]:
    """What goes where."""
    across, inside = (rule_tensor_share(16, "b200", nodes) for nodes in (8, 72))
    far = rule_example("pipeline") + rule_example("data")
    return [
        ("example", "70B on 64 devices: TP8 PP2 DP4", CONDITION,
         f"with ZeRO-1; {percent(rule_longer(EXAMPLE, 64, 'example'))} longer than the "
         "fastest on H100"),
        ("nodes", "Tensor parallelism never across nodes", CONDITION,
         f"what counts are fast links: collectives of TP16 take {percent(across)} of a "
         f"step across nodes of 8, {percent(inside)} among 72 on NVLink"),
        ("nodes", "Pipeline and data ranks may be in other nodes", HOLDS,
         f"in the example both together wait {percent(far, 2)} of a step"),
    ]  # fmt: skip


def of_stages() -> list[Row]:
    """ZeRO and FSDP."""
    return [
        ("volume", "ZeRO-1 and 2 send as much as DDP, ZeRO-3 half as much again",
         CONDITION, "in one dtype and one micro-batch; with fp32 gradients and 16-bit "
         f"weights {times(rule_volume(3, 1, 'megatron-bf16'))}, "
         f"in {SEVERAL} micro-batches "
         f"{times(rule_volume(3, SEVERAL, 'megatron-bf16'))}"),
        ("stages", "No ZeRO-2 or 3 with a pipeline", CONDITION,
         f"stage 3 waits {percent(rule_example('data', 3))} of a step of the example, "
         f"stage 2 {percent(rule_example('data', 2))}"),
        ("fsdp", "`SHARD_GRAD_OP` is ZeRO-2", CONDITION,
         f"it holds {number(rule_states('`SHARD_GRAD_OP`'))} GiB at rest, not "
         f"{number(rule_states(stage_name(2)))}, and gathers in every micro-batch"),
    ]  # fmt: skip


def of_compute() -> list[Row]:
    """Activations, micro-batches, bubbles."""
    fewest = rule_batches_for(8)
    kept, sent = (rule_sequence_parallel(what) for what in ("kept", "sent"))
    return [
        ("recompute", "Always recompute activations", WRONG,
         "only what does not fit otherwise; it costs up to a third"),
        ("batches", "Four micro-batches a pipeline rank are enough", CONDITION,
         f"if a bubble of {percent(rule_bubble(8, 32))} over the work is fine; "
         f"{percent(IDLE)} takes {fewest} on 8 ranks"),
        ("larger", "Take the largest micro-batch that fits", CONDITION,
         "without a pipeline, where it saves bytes; in one the bubble grows with it"),
        ("sequence", "Sequence parallelism costs nothing", CONDITION,
         f"it keeps {times(1 / kept, 2)} the activations and sends {times(1 / sent)} "
         "the bytes, as backward gathers again"),
    ]  # fmt: skip


@value
def rule_data_sent(stage: int) -> str:
    """What data ranks of TP8 PP2 DP4 send in a step with a stage of ZeRO."""
    return si(rule_example("sent", stage), "B")


def every_rule() -> list[Row]:
    """All of them, in the order of the page."""
    return [*of_sizes(), *of_links(), *of_stages(), *of_compute()]


@value
def rules_counted() -> int:
    """How many rules the page has."""
    return len(every_rule())


@TABLES
def rules_of_thumb() -> Table:
    """The rules with their verdicts."""
    shown = [
        [f"[{rule}](#{part})", f"**{verdict}**", why]
        for part, rule, verdict, why in every_rule()
    ]
    return Table(["as commonly said", "verdict", "in numbers"], shown, "lll")
