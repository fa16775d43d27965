"""Tables and the figure of the page on the whole model."""

from itertools import product

from xtrain.plan import collective_traffic, context_bytes

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, rank_key, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

ATTENTIONS = ("ring", "all_gather", "ulysses")
RANKS = (2, 3, 4)


def measured(attention: str, ranks: int, key_heads: int) -> dict[str, int]:
    """What a rank sends; EvidenceError unless all ranks send the formulas' bytes."""
    from .runs_model import BATCH, HEAD_DIM, HEADS, ITEMSIZE, LENGTH, traffic

    every = runs.remembered(traffic, ranks)
    found = [one[f"{attention} {key_heads}"] for one in every]
    forward, backward = context_bytes(
        attention,
        LENGTH // ranks,
        HEADS,
        key_heads,
        HEAD_DIM,
        ranks,
        batch=BATCH,
        itemsize=ITEMSIZE,
    )
    right = {"forward": forward, "backward": backward, "ends": 0}
    for rank, one in enumerate(found):
        said = {key: one[key] for key in right}
        if said != right:
            raise EvidenceError(
                f"{attention}, {key_heads} key heads, rank {rank} of {ranks}: {said}, "
                f"formula {right}"
            )
    check_gradients(found, ranks, ITEMSIZE)
    return found[0]


def check_gradients(found: list[dict[str, int]], ranks: int, itemsize: int) -> None:
    """EvidenceError unless all ranks together send one all-reduce of the parameters."""
    parameters = found[0]["parameters"]
    right = 2 * (ranks - 1) * parameters * itemsize
    total = sum(one["gradients"] for one in found)
    if total != right:
        raise EvidenceError(f"{ranks} ranks send {total} for gradients, not {right}")


@TABLES
def context_layer_bytes() -> Table:
    """Bytes of one layer by attention, ranks and key heads, held to the formula."""
    rows = []
    for attention, key_heads in product(ATTENTIONS, (12, 1)):
        for ranks in RANKS:
            one = measured(attention, ranks, key_heads)
            rows.append(
                [attention.replace("_", "-"), str(key_heads), str(ranks),
                 count(one["forward"]), count(one["backward"])]
            )  # fmt: skip
    header = ["attention", "key heads", "ranks", "forward", "backward"]
    return Table(header, rows, "lrrrr")


@TABLES
def context_gradient_bytes() -> Table:
    """Bytes of `sync_gradients`, which no attention and no length changes."""
    rows = []
    for ranks in RANKS:
        one = measured("ring", ranks, 12)
        all_reduce = collective_traffic("ring_all_reduce", one["parameters"], ranks)
        share = one["gradients"] / one["parameters"] / 8
        rows.append(
            [str(ranks), count(one["parameters"]), count(one["gradients"]),
             f"{share:.3g}", f"{max(all_reduce.sent) / one['parameters']:.3g}"]
        )  # fmt: skip
    header = ["ranks", "parameters", "bytes sent by rank 0", "elements per parameter",
              "a ring's all-reduce"]  # fmt: skip
    return Table(header, rows, "rrrrr")


# ------------------------------------------------------------- which tokens a rank has

WIDTH, LEFT, CELL = 400, 66, 20


@FIGURES
def tokens_of_context_ranks(ranks: int = 4) -> str:
    """The sequence once for each balance, every token in the colour of its rank."""
    from .runs_model import BALANCED, SHOWN, tokens_held

    found = runs.remembered(tokens_held, ranks)
    parts, y, words = rank_key(ranks), 34, []
    for balance in BALANCED:
        holder = {token: r for r, held in enumerate(found) for token in held[balance]}
        if sorted(holder) != list(range(SHOWN)):
            raise EvidenceError(f"{balance}: not every token on one rank: {holder}")
        parts.append(text(LEFT - 8, y + 14, balance, "xt-tick", "end"))
        for token in range(SHOWN):
            x = LEFT + CELL * token
            rank = holder[token]
            hover = f"token {token}, rank {rank}"
            parts.append(rect(x, y, CELL - 2, CELL - 2, rank, hover=hover))
            parts.append(
                text(x + (CELL - 2) / 2, y + 34, str(token), "xt-tick", "middle")
            )
        words.append(f"{balance}: rank 0 has {found[0][balance]}")
        y += 52
    title = "Which tokens of a sequence each context rank has"
    return fit(document(WIDTH, y, parts, title, "; ".join(words)), WIDTH)
