"""Ring, all-gather and Ulysses side by side: measured bytes and tensors."""

from xtrain.plan import context_bytes

from ... import runs
from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from ...values import number, value

NAMES = {
    "ring": "ring attention",
    "all_gather": "all-gather attention",
    "ulysses": "Ulysses",
}
HEAD_DIM, FLOAT32, LOCAL = 8, 4, 16


def measured(way: str, heads: int, key_heads: int, ranks: int) -> tuple[int, int]:
    """Bytes a rank sent forward and backward, which have to be the formula's."""
    from .runs_compare import sent

    expected = context_bytes(
        way, LOCAL, heads, key_heads, HEAD_DIM, ranks, itemsize=FLOAT32
    )
    found = runs.remembered(sent, ranks, way, heads, key_heads, LOCAL)
    for rank, passes in enumerate(found):
        if tuple(passes) != expected:
            raise EvidenceError(f"{way}, rank {rank}: {passes}, not {expected}")
    return expected


@REGISTRY
def context_bytes_measured(ranks: int = 4, heads: int = 8) -> Table:
    """What a rank sends in each way, with as many key heads and with fewer."""
    rows = []
    for key_heads in (heads, heads // 4):
        for way, name in NAMES.items():
            forward, backward = measured(way, heads, key_heads, ranks)
            first = str(key_heads) if way == "ring" else ""
            rows.append(
                [first, name, *(number(n) for n in (forward, backward)),
                 number(forward + backward)]
            )  # fmt: skip
    header = ["key heads", "", "forward", "backward", "both"]
    return Table(header, rows, "rlrrr")


@REGISTRY
def context_tensors(
    heads: int = 8, key_heads: int = 8, sizes: tuple[int, ...] = (2, 4, 8)
) -> Table:
    """What is kept for backward, and the largest tensor, in multiples of a rank's q."""
    from .runs_compare import tensors_of

    rows = []
    for way, name in NAMES.items():
        for ranks in sizes:
            arguments = (way, heads, key_heads, LOCAL)
            q, *others = runs.remembered(tensors_of, ranks, *arguments)[0]
            first = name if ranks == sizes[0] else ""
            rows.append([first, str(ranks), *(f"{n / q:.3g}" for n in others)])
    header = ["", "ranks", "kept for backward", "largest, forward",
              "largest, backward"]  # fmt: skip
    return Table(header, rows, "lrrrr")


@value
def ring_over_ulysses(ranks: int, heads: int, key_heads: int) -> float:
    """Forward bytes of a ring over those of Ulysses."""
    ring, ulysses = (
        context_bytes(way, ranks, heads, key_heads, 1, ranks)[0]
        for way in ("ring", "ulysses")
    )
    return ring / ulysses


@REGISTRY
def ring_volume(
    key_heads: int = 2, tokens: int = 64, sizes: tuple[int, ...] = (2, 4, 8)
) -> Table:
    """What a rank of a ring sends of one sequence, in multiples of S d; float32."""
    from .runs_compare import sent

    unit = tokens * key_heads * HEAD_DIM * FLOAT32
    rows = []
    for ranks in sizes:
        local = tokens // ranks
        found = runs.remembered(sent, ranks, "ring", key_heads, key_heads, local)
        expected = context_bytes(
            "ring", local, key_heads, key_heads, HEAD_DIM, ranks, itemsize=FLOAT32
        )
        if any(tuple(passes) != expected for passes in found):
            raise EvidenceError(f"{ranks} ranks: {found}, not {expected}")
        forward, backward = expected
        together = sum(passes[0] for passes in found)
        in_units = [forward, backward, forward + backward, together]
        rows.append([str(ranks), *(f"{n / unit:.4g}" for n in in_units)])
    header = ["ranks", "a rank, forward", "a rank, backward", "both",
              "all ranks, forward"]  # fmt: skip
    return Table(header, rows, "rrrrr")


@REGISTRY
def strong_and_weak(tokens: int = 64, few: int = 4) -> Table:
    """Bytes and work of a rank of a ring, at (S, N), (S, 2 N) and (2 S, 2 N)."""
    from .runs_balance import work
    from .runs_compare import sent

    rows = []
    for length, ranks in ((tokens, few), (tokens, 2 * few), (2 * tokens, 2 * few)):
        forward, _ = runs.remembered(sent, ranks, "ring", 1, 1, length // ranks)[0]
        done = runs.remembered(work, ranks, "zigzag", length)
        pairs = max(sum(one) for one, _ in done)
        ratio = pairs / forward
        rows.append([str(length), str(ranks), number(forward), number(pairs),
                     f"{ratio:.3f}", str(length // ranks)])  # fmt: skip
    header = ["tokens", "ranks", "bytes of a rank", "pairs of a rank",
              "pairs a byte", "tokens of a rank"]  # fmt: skip
    return Table(header, rows, "rrrrrr")
