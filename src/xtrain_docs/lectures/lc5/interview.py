"""Tables of the questions of lc5: counted in schedules, or measured in small runs."""

from xtrain.schedules import SCHEDULES, simulate, with_messages

from ... import runs
from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from ...values import percent, value
from .figures import TITLES, played
from .pair_order import EXCHANGES, ORDERS, exposed
from .published import agree


@REGISTRY
def held_in_a_run(
    names: str = "gpipe one_f_one_b", ranks: int = 4, micro_batches: int = 8
) -> Table:
    """Micro-batches that autograd held at the same time, counted on every rank."""
    from .runs_errata import most_held

    rows = []
    for name in names.split():
        found = runs.remembered(most_held, ranks, name, micro_batches)
        simulated = list(played(name, ranks, micro_batches).peak_activations)
        if found != simulated:
            raise EvidenceError(f"{name}: ranks held {found}, simulated {simulated}")
        rows.append([TITLES[name], *map(str, found), str(sum(found))])
    header = ["schedule", *(f"rank {r}" for r in range(ranks)), "together"]
    return Table(header, rows, "l" + "r" * (ranks + 1))


@REGISTRY
def dualpipe_or_1f1b(ranks: int = 8, micro_batches: int = 20) -> Table:
    """Both schedules at one size, also with an exchange of experts in each half."""
    rows = []
    for name in ("one_f_one_b", "dualpipe"):
        timeline = played(name, ranks, micro_batches)
        slower = simulate(timeline.schedule, all_to_all=1.0)
        rows.append(
            [TITLES[name], f"{max(timeline.idle):g}", percent(timeline.idle_fraction),
             f"{max(timeline.peak_activations):g}", str(timeline.parameter_copies),
             f"{timeline.makespan:g}", f"{slower.makespan:g}"]
        )  # fmt: skip
    header = ["schedule", "idle", "of the step", "activations", "copies of weights",
              "step", "step with exchanges"]  # fmt: skip
    return Table(header, rows, "lrrrrrr")


@REGISTRY
def micro_batches_of_a_batch(ranks: int = 8, sequences: int = 1024) -> Table:
    """What data parallelism leaves of a global batch for the pipeline; 1 per micro."""
    rows = []
    for data in (8, 32, 64, 128):
        m = sequences // data
        timeline = played("one_f_one_b", ranks, m)
        agree("of the step", timeline.idle_fraction, (ranks - 1) / (m + ranks - 1))
        rows.append([str(data), str(m), percent(timeline.idle_fraction, 1)])
    return Table(["pipelines", "micro-batches each", "idle share"], rows, "rrr")


@REGISTRY
def chunks_of_a_rank(ranks: int = 4, micro_batches: int = 8) -> Table:
    """Interleaved 1F1B by the number of chunks, with times of a rank's whole part."""
    rows = []
    for chunks in (1, 2, 4):
        part = 1 / chunks
        timeline = played(
            "interleaved", ranks, micro_batches, chunks,
            forward=part, backward_input=part, backward_weight=part,
        )  # fmt: skip
        agree("idle", max(timeline.idle), 3 * (ranks - 1) / chunks)
        order = with_messages(timeline.schedule)
        sent = sum(a.kind.startswith("SEND") for row in order.actions for a in row)
        agree("messages", sent / micro_batches, 2 * (ranks * chunks - 1))
        rows.append(
            [str(chunks), f"{max(timeline.idle):g}", f"{timeline.bubble_over_ideal:g}",
             f"{max(timeline.peak_activations):g}", f"{sent / micro_batches:g}"]
        )  # fmt: skip
    header = ["chunks", "idle", "over work", "activations", "messages a micro-batch"]
    return Table(header, rows, "rrrrr")


@REGISTRY
def errors_by_divisor(ranks: int = 2) -> Table:
    """How wrong the gradients are, by what each micro-batch's loss is divided by."""
    from .runs_interview import DIVISORS, error_of_gradients

    rows = []
    for by in DIVISORS:
        found = max(runs.remembered(error_of_gradients, ranks, by))
        if (found < 1e-12) != (by == DIVISORS[0]):
            raise EvidenceError(f"divided by {by}: off by {found}")
        rows.append([by, "none" if found < 1e-12 else percent(found)])
    return Table(["loss divided by", "largest error of a gradient"], rows, "lr")


def updates_between(name: str, ranks: int, micro_batches: int) -> list[int]:
    """Per rank: most backwards between a micro-batch's forward and its own."""
    most = []
    for rank, actions in enumerate(SCHEDULES[name](ranks, micro_batches).actions):
        at = {(a.kind, a.micro_batch): i for i, a in enumerate(actions)}
        kinds = [a.kind for a in actions]
        between = [
            kinds[at["F", i] : at["BW", i]].count("BW") for i in range(micro_batches)
        ]
        agree(f"rank {rank}", between[-1], max(between))
        most.append(max(between))
    return most


@value
def units_of_pair(order: str = "pair", in_turn: bool = False) -> float:
    """How long two micro-batches take if each part, also an exchange, takes 1."""
    slots = ORDERS[order]
    parts = [part for slot in slots for part in slot]
    if in_turn:
        return float(len(parts))
    computed = sum(part.part not in EXCHANGES for part in parts)
    return computed + exposed(slots, 1.0, 1.0)


@value
def versions_kept(ranks: int, micro_batches: int, rank: int) -> int:
    """Versions of its weights that a rank of 1F1B keeps, stepping after a backward."""
    return updates_between("one_f_one_b", ranks, micro_batches)[rank] + 1


@REGISTRY
def weight_versions(ranks: int = 4, micro_batches: int = 8) -> Table:
    """Versions of the weights that 1F1B needs if a step follows every backward."""
    found = updates_between("one_f_one_b", ranks, micro_batches)
    agree("versions", sum(found), ranks * (ranks - 1) / 2)
    rows = [
        ["steps between forward and backward", *map(str, found)],
        ["versions to keep", *(str(n + 1) for n in found)],
    ]
    return Table(["", *(f"rank {r}" for r in range(ranks))], rows, "l" + "r" * ranks)
