"""Tables and values of the questions of lc7: measured in small runs, or computed."""

import math

from xtrain.plan import nodes_visited

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from ...values import value

PHASES = ("counts", "dispatch", "combine", "combine, backward", "dispatch, backward")


@value
def combinations(experts: int, chosen: int) -> int:
    """In how many ways a token can choose its experts."""
    return math.comb(experts, chosen)


@REGISTRY
def order_of_exchanges(ranks: int = 4) -> Table:
    """The all-to-alls of a layer on rank 0: whose splits are whose."""
    from .runs_interview import exchanges

    found = runs.remembered(exchanges, ranks)
    rows = []
    for name, call in zip(PHASES, found[0], strict=True):
        rows.append([name, *(splits(call[key]) for key in ("sent", "received"))])
    for one in found:
        _, there, back, *backward = ([c["sent"], c["received"]] for c in one)
        if back != there[::-1] or backward != [there, back]:
            raise EvidenceError(f"splits of the all-to-alls: {one}")
    return Table(["", "rows to ranks", "rows from ranks"], rows, "lll")


def splits(rows: list[int] | None) -> str:
    """Of counts, every rank gets as many numbers."""
    return "as many numbers for each" if rows is None else ", ".join(map(str, rows))


@REGISTRY
def uneven_exchange(ranks: int = 4) -> Table:
    """Messages of rank 0 in a dispatch and in a ring all-reduce of the same tokens."""
    from .runs_interview import messages_of_both, received_rows

    found = runs.remembered(messages_of_both, ranks)
    rows = []
    for name in ("dispatch", "all-reduce"):
        sent = found[0][name]
        sizes = sorted({nbytes for _, nbytes in sent})
        peers = len({peer for peer, _ in sent})
        rows.append([name, str(len(sent)), str(peers), ", ".join(map(count, sizes))])
        if (peers == 1) != (name == "all-reduce"):
            raise EvidenceError(f"{name}: messages {sent}")
    arrived = runs.remembered(received_rows, ranks)
    rows[0].append(", ".join(map(str, arrived)))
    rows[1].append("")
    if max(arrived) == min(arrived):
        raise EvidenceError(f"all ranks received {arrived[0]} rows")
    header = [
        "",
        "messages",
        "other ranks",
        "sizes in bytes",
        "rows that ranks receive",
    ]
    return Table(header, rows, "lrrll")


@REGISTRY
def token_nodes(experts: int = 64, nodes: int = 8, top_k: int = 8) -> Table:
    """Nodes that a token's experts are on, counted, with and without a limit."""
    from .runs_interview import nodes_of_tokens

    rows = []
    for limit in (nodes, nodes // 2, nodes // 4):
        found = runs.remembered(nodes_of_tokens, 1, experts, nodes, top_k, limit, 4096)[
            0
        ]
        counted = {int(visited): tokens for visited, tokens in found.items()}
        mean = sum(n * tokens for n, tokens in counted.items()) / sum(counted.values())
        if max(counted) > limit:
            raise EvidenceError(f"limit {limit}: {counted}")
        computed = nodes_visited(experts, top_k, nodes) if limit == nodes else None
        rows.append([
            "none" if limit == nodes else str(limit), f"{mean:.2f}", str(max(counted)),
            "" if computed is None else f"{computed:.2f}",
        ])  # fmt: skip
    header = [
        "limit",
        "nodes of a token, mean",
        "most",
        "if experts were drawn at random",
    ]
    return Table(header, rows, "lrrr")
