"""Who does how much work under a causal mask: counted in runs, beside closed forms."""

from xtrain.plan import critical_pairs, ideal_pairs, pairs_by_step

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, times, value

BALANCES = ("none", "striped", "zigzag")
WIDTH = 390


def counted_work(balance: str, ranks: int, tokens: int) -> list[list[int]]:
    """Pairs by rank and step of a real run, which has to be the closed form."""
    from .runs_balance import work

    expected = pairs_by_step(balance, ranks, tokens // ranks)
    found = runs.remembered(work, ranks, balance, tokens)
    for rank, passes in enumerate(found):
        for by_step in passes:
            if by_step != expected[rank]:
                raise EvidenceError(
                    f"{balance}, rank {rank}: counted {by_step}, by the closed form "
                    f"{expected[rank]}"
                )
    return [forward for forward, _ in found]


def slowest(by_step: list[list[int]]) -> list[int]:
    """Of each step, the work of the rank that has most."""
    return list(map(max, zip(*by_step, strict=True)))


@TABLES
def balance_by_rank(ranks: int = 4, tokens: int = 16) -> Table:
    """Pairs of each rank in the whole ring, counted."""
    rows = []
    for balance in BALANCES:
        found = counted_work(balance, ranks, tokens)
        path = sum(slowest(found))
        if path != critical_pairs(balance, ranks, tokens // ranks):
            raise EvidenceError(f"{balance}: critical path {path}")
        rows.append([balance, *(str(sum(row)) for row in found), str(path)])
    header = ["balance", *(f"rank {r}" for r in range(ranks)), "critical path"]
    return Table(header, rows, "l" + "r" * (ranks + 1))


@TABLES
def balance_over_ideal(sizes: tuple[tuple[int, int], ...] = ((4, 16), (8, 1024))):
    """Critical path of each balance, counted, over evenly divided work."""
    rows = []
    for ranks, tokens in sizes:
        ideal = ideal_pairs(ranks, tokens // ranks)
        for balance in BALANCES:
            found = counted_work(balance, ranks, tokens)
            by_rank = [sum(row) for row in found]
            path = sum(slowest(found))
            first = balance == BALANCES[0]
            rows.append(
                [number(tokens) if first else "", str(ranks) if first else "", balance,
                 number(min(by_rank)), number(max(by_rank)), number(path),
                 times(path / ideal, 4), percent(ideal / path)]
            )  # fmt: skip
    header = ["tokens", "ranks", "balance", "least busy rank", "busiest rank",
              "critical path", "over ideal", "efficiency"]  # fmt: skip
    return Table(header, rows, "rrlrrrrr")


@value
def zigzag_over_none(ranks: int, tokens: int) -> float:
    """How many times as long the critical path is without balance; closed forms."""
    paths = [critical_pairs(b, ranks, tokens // ranks) for b in ("none", "zigzag")]
    return paths[0] / paths[1]


# ------------------------------------------------------------------------ figures

HIGH, GAP = 27, 3
LEFT, RIGHT = 66, 62


@FIGURES
def causal_work(ranks: int = 4, tokens: int = 16) -> str:
    """Heat map of each balance: ranks by steps of the ring, pairs counted in a run."""
    wide = (WIDTH - LEFT - RIGHT) / ranks
    most = (tokens // ranks) ** 2
    parts, y = [], 16.0
    for balance in BALANCES:
        found = counted_work(balance, ranks, tokens)
        path = slowest(found)
        parts.append(text(4, y, f'balance="{balance}"', "xt-label"))
        y += 20
        for step in range(ranks):
            x = LEFT + wide * (step + 0.5)
            parts.append(text(x, y, f"step {step}", "xt-tick", "middle"))
        parts.append(text(WIDTH - 4, y, "in all", "xt-tick", "end"))
        y += 7
        for rank, row in enumerate(found):
            parts.append(text(4, y + 18, f"rank {rank}", "xt-tick"))
            for step, pairs in enumerate(row):
                words = f"rank {rank}, step {step}: {pairs} pairs"
                x = LEFT + wide * step
                opacity = 0.08 + 0.47 * pairs / most
                parts += cell(x, y, wide - GAP, HIGH - GAP, 0, str(pairs), low=5,
                              opacity=opacity, radius=2, hover=words)  # fmt: skip
            parts.append(text(WIDTH - 4, y + 17, str(sum(row)), "xt-label", "end"))
            y += HIGH
        parts.append(text(4, y + 18, "slowest", "xt-tick"))
        for step, pairs in enumerate(path):
            middle = LEFT + wide * step + (wide - GAP) / 2
            parts.append(text(middle, y + 17, str(pairs), "xt-label", "middle"))
        parts.append(text(WIDTH - 4, y + 17, str(sum(path)), "xt-label", "end"))
        y += HIGH + 26
    title = f"Causal work of {tokens} tokens on {ranks} ranks"
    words = "Pairs of a query and a key, counted by rank and step, for three balances"
    return fit(document(WIDTH, int(y - 20), parts, title, words), WIDTH)


@FIGURES
def who_computes(balance: str = "zigzag", ranks: int = 4, tokens: int = 16) -> str:
    """The attention matrix in the order of the sequence, by who computes it."""
    from .runs_balance import seen

    edge, left, top = 19.0, 74.0, 44.0
    parts = [text(4, 16, f'balance="{balance}"', "xt-label")]
    for rank in range(ranks):
        x = 136 + 62 * rank
        parts.append(rect(x, 5, 13, 13, rank, opacity=0.85, radius=2,
                          hover=f"rank {rank}"))  # fmt: skip
        parts.append(text(x + 18, 16, f"rank {rank}", "xt-tick"))
    parts.append(text(left, 37, "keys", "xt-tick"))
    parts.append(text(4, top + 14, "queries", "xt-tick"))
    found = runs.remembered(seen, ranks, balance, tokens)
    pairs = sorted((q, k, rank) for rank, met in enumerate(found) for q, k in met)
    expected = [(q, k) for q in range(tokens) for k in range(q + 1)]
    if [(q, k) for q, k, _ in pairs] != expected:
        raise EvidenceError(f"{balance}: not every pair is computed exactly once")
    for q, k, rank in pairs:
        words = f"query {q}, key {k}: rank {rank}"
        x, y = left + edge * k, top + edge * q
        parts.append(rect(x, y, edge - 2, edge - 2, rank, opacity=0.85,
                          radius=2, hover=words))  # fmt: skip
    title = f"Who computes which pair, {tokens} tokens on {ranks} ranks, {balance}"
    high = int(top + edge * tokens + 6)
    return fit(document(WIDTH, high, parts, title, "Each pair of a causal mask"), WIDTH)
