"""A dry run beside the planner, as text: does it fit, what it costs, why they differ.

dry run     a step of the code, operator by operator, at peak rates
planner     its formulas for the same layout, at peak rates
fitted      the same with constants of published runs: what to expect
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from xtrain.plan.device_memory import DeviceMemory
from xtrain.plan.estimate import Estimate, estimate
from xtrain.plan.step_traffic import sent_by_axis, traffic_per_step
from xtrain.plan.time_constants import EXACT, FITTED
from xtrain.train.dry_run import DryRun
from xtrain.train.layouts import axes_of
from xtrain.train.traffic import transfer_dtypes

GIB, GB = 2**30, 1e9
WORDS = {
    "fused": "operators run one by one, each reads and writes memory; the planner at "
    "peak rates\n    counts products alone, and activations of fused kernels",
    "bubble": "a pipeline's bubble is in the waits of its axis",
    "stages": "the trainer cuts layers so that stages cost the same, head included; "
    "the planner\n    spreads them evenly",
    "autocast": "autocast keeps 16-bit copies of weights, counted with activations",
    "float32": "float32 products are timed at the 16-bit rate",
    "muon": "the planner has AdamW's state, and sends none of Muon's matrices",
    "reduced": "gradients are freed as they are reduced; the planner has all at once",
}
LINE = "{:<26}{:>14}{:>14}{:>14}".format


class Planned(NamedTuple):
    """The planner's answers for a recipe."""

    exact: Estimate
    fitted: Estimate
    sent: dict[str, int]


def planned(run: DryRun) -> Planned:
    """For the layout of a dry run, on its accelerator."""
    recipe, sequence = run.recipe, run.recipe.data.sequence
    parts = recipe.layout.data * recipe.layout.micro_batches
    layout = replace(recipe.layout, micro_batch=-(-recipe.batch // parts))
    rows = recipe.model.vocab_rows
    shape = replace(recipe.model, vocab_size=rows, padded_vocab_size=None)
    dtypes = transfer_dtypes(recipe.dtype)
    device = replace(run.accelerator, matmul=run.accelerator.flops)
    exact, fitted = (
        estimate(
            shape, layout, on, sequence, constants=constants, recipe="fp32",
            dtypes=dtypes, sharded_pipeline=True, reserve=0.0,
        )
        for on, constants in ((device, EXACT), (run.accelerator, FITTED))
    )  # fmt: skip
    inner = layout.gpus // layout.pipeline
    sent = traffic_per_step(
        shape, layout, sequence, rank=run.busiest // inner, dtypes=dtypes
    )
    return Planned(exact, fitted, sent_by_axis(sent))


def text(run: DryRun, plan: Planned | None = None) -> str:
    """The table, without what differs from one machine to the next."""
    plan = plan or planned(run)
    lines = [*head(run), "", *costs(run, plan), "", *verdict(run)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def head(run: DryRun) -> Iterator[str]:
    sizes = axes_of(run.recipe.layout)
    layout = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1)
    ranks, some = run.recipe.layout.gpus, len(run.executed)
    parameters = run.recipe.model.parameters
    yield f"{parameters / 1e9:,.3g}e9 parameters on {ranks} ranks: {layout or 'one'}"
    which = "all" if some == ranks else "one of each class"
    yield f"{run.topology}, {run.accelerator.name}; executed {some}, {which}"


def costs(run: DryRun, plan: Planned) -> Iterator[str]:
    exact, fitted = plan.exact, plan.fitted
    yield LINE("", "dry run", "planner", "fitted")
    for name, one, *others in (
        ("seconds of a step", run.seconds, exact.seconds, fitted.seconds),
        ("tokens a second", run.tokens_per_second, exact.tokens_per_second,
         fitted.tokens_per_second),
        ("MFU, %", 100 * run.mfu, 100 * exact.mfu, 100 * fitted.mfu),
    ):  # fmt: skip
        yield LINE(name, *(f"{number:,.3g}" for number in (one, *others)))
    yield LINE(f"seconds of rank {run.busiest}", "", "", "")
    yield from seconds(run, plan)
    yield LINE(f"GiB of rank {run.fullest}", f"{run.peak / GIB:,.2f}",
               f"{exact.memory.total / GIB:,.2f}", "")  # fmt: skip
    beside = memory_by_kind(exact.memory)
    for kind, held in run.memory.items():
        yield LINE(f"  {kind}", f"{held / GIB:,.2f}", f"{beside[kind] / GIB:,.2f}", "")
    yield LINE(f"GB sent by rank {run.busiest}", "", "", "")
    for axis in dict.fromkeys([*plan.sent, *run.sent]):
        both = (run.sent.get(axis, 0) / GB, plan.sent.get(axis, 0) / GB)
        if max(both) >= 5e-7:
            yield LINE(f"  {axis}", *(f"{number:,.3g}" for number in both), "")


def seconds(run: DryRun, plan: Planned) -> Iterator[str]:
    """Of the busiest rank, in operators and in calls by axis."""
    spent = dict(run.waited)
    rows = {"computing": run.computed, **spent}
    for name, number in rows.items():
        beside = [seconds_of(name, one.parts) for one in (plan.exact, plan.fitted)]
        label = name if name == "computing" else f"waiting, {name}"
        yield LINE(f"  {label}", *(f"{n:,.3g}" for n in (number, *beside)))


def seconds_of(name: str, parts: dict[str, float]) -> float:
    """The planner's part for a row."""
    if name == "computing":
        return parts["compute"] + parts["optimizer"]
    if name == "pipeline":
        return parts["bubble"] + parts["pipeline"]
    return parts.get(name, 0.0)


def memory_by_kind(memory: DeviceMemory) -> dict[str, float]:
    """The planner's parts in the words of a dry run."""
    return {
        "weights": memory.weights + memory.gathered + memory.root,
        "gradients": memory.gradients + memory.main_gradients,
        "optimizer state": memory.master + memory.moments,
        "activations": memory.activations + memory.live_layer + memory.logits,
        "update": memory.update,
    }


def verdict(run: DryRun) -> Iterator[str]:
    peak, most = run.peak / GIB, run.accelerator.memory / GIB
    fits = "fits" if run.peak <= run.accelerator.memory else "does not fit"
    yield f"{fits}: {peak:,.2f} of {most:,.2f} GiB on the fullest rank"
    yield "ends: no call waits for ever, every message is received"
    yield "why they differ:"
    for word in differences(run):
        yield f"  - {WORDS[word]}"


def differences(run: DryRun) -> Iterator[str]:
    """Known causes that are at work here."""
    yield "fused"
    layout, dtype = run.recipe.layout, run.recipe.dtype
    if layout.pipeline > 1:
        yield "bubble"
        yield "stages"
    if dtype == "bfloat16":
        yield "autocast"
    else:
        yield "float32"
    if run.recipe.optimizer.kind == "muon":
        yield "muon"
    if layout.zero > 1 and layout.data > 1:
        yield "reduced"
