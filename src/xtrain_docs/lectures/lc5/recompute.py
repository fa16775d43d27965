"""Figures and tables of the page on activation recompute, drawn from runs."""

from xtrain.plan import activation_memory

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY, Table

MIB = 2**20
TITLES = {0: "no recompute", 1: "each layer", 2: "segments of 2 layers"}


def measured(layers: int, each: int) -> list[tuple[str, int, int]]:
    """Every end of a layer's run: its kind, the layer, bytes that are alive then."""
    from .runs_recompute import live_bytes

    (found,) = runs.remembered(live_bytes, 1, layers, each)
    return [(kind, layer, nbytes) for kind, layer, nbytes in found]


def kept(layers: int, each: int) -> int:
    """Bytes that a forward keeps; without recompute if `each` is 0."""
    from .runs_recompute import kept_bytes

    (found,) = runs.remembered(kept_bytes, 1, layers, each)
    return int(found)


def placed(events: list[tuple[str, int, int]]) -> list[tuple[float, float]]:
    """Points of a line: every forward and every backward takes one step to the right.

    Second runs lie between the backwards before and after them.
    """
    points, at, again = [], 0.0, 0
    for place, (kind, _, nbytes) in enumerate(events):
        if kind == "again":
            left = 0
            while events[place + left][0] == "again":
                left += 1
            again += 1
            points.append((at + again / (again + left), nbytes / MIB))
        else:
            at, again = at + 1, 0
            points.append((at, nbytes / MIB))
    return points


@FIGURES
def recompute_memory(layers: int = 8, each: tuple[int, ...] = (0, 1, 2)) -> str:
    """Live activations over a forward and a backward, by size of the segments."""
    series = {TITLES[e]: placed(measured(layers, e)) for e in each}
    peak = {name: max(nbytes for _, nbytes in line) for name, line in series.items()}
    if not peak[TITLES[1]] < peak[TITLES[0]] / 3:
        raise EvidenceError(f"recompute saves too little: {peak}")
    words = ", ".join(f"{name}: at most {most:.1f} MiB" for name, most in peak.items())
    ticks = [0, layers / 2, layers, 1.5 * layers, 2 * layers]
    return line_chart(
        series,
        Axis("layers done: forward, then backward", low=0, ticks=ticks),
        Axis("activations that are alive, MiB", format=lambda n: f"{n:g}", low=0),
        "Activations over a forward and a backward",
        words,
        marks=[(layers, "backward begins")],
    )


@REGISTRY
def recompute_bytes(layers: int = 8, each: tuple[int, ...] = (1, 2, 4, 8)) -> Table:
    """What forward keeps and what is alive at most, beside the forms L I / k + k A."""
    one, whole = kept(1, 0), kept(layers, 0)
    entry = kept(1, 1)
    if whole != layers * one:
        raise EvidenceError(f"{layers} layers keep {whole}, one keeps {one}")
    alive = max(nbytes for *_, nbytes in measured(layers, 0))
    within("no recompute", alive, whole + entry)
    rows = [["no recompute", count(whole), "$L A$", count(alive), count(whole + entry)]]
    for k in each:
        found, alive = kept(layers, k), max(b for *_, b in measured(layers, k))
        if found != layers // k * entry:
            raise EvidenceError(f"segments of {k}: {found} bytes are kept")
        form = layers // k * entry + k * one + entry
        within(f"segments of {k}", alive, form)
        rows.append(
            [f"segments of {k}" if k > 1 else "each layer", count(found),
             f"$\\frac{{L}}{{{k}}} I$" if k > 1 else "$L I$", count(alive), count(form)]
        )  # fmt: skip
    header = ["recompute", "kept after forward", "form, equal", "alive at most",
              "form"]  # fmt: skip
    return Table(header, rows, "lrlrr")


def within(what: str, found: int, form: int, share: float = 0.01) -> None:
    """Stop the build unless a form is right but for what is small."""
    if abs(found - form) > share * form:
        raise EvidenceError(f"{what}: {found} bytes at most, the form says {form}")


@REGISTRY
def recompute_flops(layers: int = 4) -> Table:
    """Operations of the linear layers' matmuls in a step, in forwards."""
    from .runs_recompute import flops

    (found,) = runs.remembered(flops, 1, layers)
    forward = found["none"] / 3
    if found["ours"] != 4 * forward or not 3 < found["torch's"] / forward < 4:
        raise EvidenceError(f"operations by kind of recompute: {found}")
    names = {
        "none": "no recompute",
        "ours": "ours, each layer, to its end",
        "torch's": "torch's, each layer, to its last saved tensor",
    }
    rows = [
        [title, count(found[name]), f"{found[name] / forward:g}"]
        for name, title in names.items()
    ]
    return Table(["recompute", "operations", "in forwards"], rows, "lrr")


@REGISTRY
def recompute_selective(
    sequence: int = 2048, batch: int = 1, hidden: int = 12288, heads: int = 96
) -> Table:
    """Bytes of a GPT layer by kind of recompute, and what it computes again."""
    rows = []
    scores = sequence / (6 * hidden)  # the attention core's part of a layer's matmuls
    again = {
        "none": 0.0,
        "selective": scores / 3 / (1 + scores),
        "full": 1 / 3,
    }
    for kind, extra in again.items():
        sizes = (sequence, batch, hidden, heads)
        alone = activation_memory(*sizes, recompute=kind)
        cut = activation_memory(
            *sizes, tensor=8, sequence_parallel=True, recompute=kind
        )
        rows.append(
            [kind, f"{alone / MIB:.0f}", f"{cut / MIB:.0f}", f"{100 * extra:.1f} %"]
        )
    header = ["recompute", "MiB a layer", "on 8 tensor ranks, sequence-parallel",
              "more computation"]  # fmt: skip
    return Table(header, rows, "lrrr")
