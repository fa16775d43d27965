"""One device: a small batch, and its copies in the order of their experts."""

import math

import torch

from xtrain.expert_parallel import TopKRouter
from xtrain.expert_parallel.routing import sort_copies

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, line, text
from ...values import value

TOKENS, EXPERTS, TOP_K = 8, 4, 2
WIDTH, SIDE, APART = 400, 20, 12


@value
def combinations(experts: int, chosen: int) -> int:
    """In how many ways a token can choose its experts."""
    return math.comb(experts, chosen)


def sorted_batch() -> dict[str, list]:
    """Choices of a router with random weights, and the order of the copies."""
    torch.manual_seed(5)
    with torch.no_grad():
        routing = TopKRouter(6, EXPERTS, TOP_K)(torch.randn(TOKENS, 6) + 0.5)
    order = sort_copies(routing.experts_Tk, routing.kept_Tk, routing.counts_E)
    return {
        "experts": routing.experts_Tk.flatten().tolist(),
        "counts": routing.counts_E.tolist(),
        "order": order.tolist(),
    }


@value
def rows_of_picture() -> list[int]:
    """Rows of each expert in the picture."""
    return runs.remembered(sorted_batch, 1)[0]["counts"]


@REGISTRY
def sorted_copies() -> str:
    """Tokens with their experts, and below the copies in the order of the experts."""
    found = runs.remembered(sorted_batch, 1)[0]
    experts = found["experts"]
    parts = [
        text(4, 16, "before: the copies of each token", "xt-label"),
        text(4, 86, "after: sorted by expert", "xt-label"),
    ]

    def draw(copy: int, x: float, y: float) -> None:
        token, expert = copy // TOP_K, experts[copy]
        hover = f"token {token} for expert {expert}"
        parts.extend(cell(x, y, SIDE - 2, SIDE - 2, expert, str(token), low=5,
                          opacity=0.35, radius=0, hover=hover))  # fmt: skip

    for copy in range(len(experts)):
        draw(copy, 12.0 + SIDE * copy + 6 * (copy // TOP_K), 26)
    for at, copy in enumerate(found["order"]):
        draw(copy, 6.0 + SIDE * at + APART * experts[copy], 96)
    x = 6.0
    for expert, count in enumerate(found["counts"]):
        end = x + SIDE * count
        parts.append(line(x, 120, end - 2, 120, "xt-axis"))
        middle = max(28.0, (x + end) / 2 - 1)
        parts.append(text(middle, 136, f"expert {expert}", "xt-tick", "middle"))
        x = end + APART
    title = f"{TOKENS} tokens and their copies, sorted by expert"
    words = f"Rows of the experts: {found['counts']}"
    return document(WIDTH, 146, parts, title, words)
