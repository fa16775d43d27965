"""Pictures of who computes which pair of a causal mask, drawn from real runs."""

import torch

from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import deal_documents, ring_attention, shard_sequence
from xtrain.context_parallel.balance import positions_of
from xtrain.context_parallel.block_attention import TILES

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, rect, text
from ...values import value

WIDTH, RANKS, TOKENS = 390, 4, 16


def met(balance: str, tokens: int) -> list[list[int]]:
    """[step, query, key] of every pair that this rank's blocks let meet, forward.

    Queries and keys hold their positions, and values the rank that they belong to.
    """
    rank, size = rank_and_size(None)
    found: list[list[int]] = []

    def forward(q, k, v, causal, scale):
        step = (rank - int(v[0, 0, 0, 0])) % size
        seen = torch.ones(q.shape[2], k.shape[2]).tril(0 if causal else k.shape[2])
        for row, column in seen.nonzero().tolist():
            found.append([step, int(q[0, 0, row, 0]), int(k[0, 0, column, 0])])
        return TILES.forward(q, k, v, causal, scale)

    whole = torch.arange(float(tokens)).view(1, 1, -1, 1)
    mine = shard_sequence(whole, 2, balance)
    ring_attention(
        mine, mine, torch.full_like(mine, rank), True, balance,
        block_attention=TILES._replace(forward=forward),
    )  # fmt: skip
    return found


@value
def over_mean(balance: str, ranks: int) -> float:
    """Pairs of the busiest rank over the mean, of drawn documents in one sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(12, generator=generator).exp() * 300 + 1).long().tolist()
    lengths[-1] += -sum(lengths) % (2 * ranks)  # so that zigzag can cut them
    ids = torch.arange(12).repeat_interleave(torch.tensor(lengths))
    seen = torch.cat([torch.arange(length) + 1 for length in lengths])
    how = deal_documents(ids, ranks) if balance == "dealt" else balance
    local = len(seen) // ranks
    work = [
        int(seen[positions_of(rank, ranks, local, how)].sum()) for rank in range(ranks)
    ]
    return max(work) / sum(work) * ranks


HIGH, GAP, LEFT = 27, 3, 66
WIDE = (WIDTH - LEFT - 62) / RANKS


@REGISTRY
def causal_work() -> str:
    """Heat map of each balance: ranks by steps of the ring, pairs counted in a run."""
    most = (TOKENS // RANKS) ** 2
    parts, y = [], 16.0
    for balance in ("none", "striped", "zigzag"):
        parts.append(text(4, y, f'balance="{balance}"', "xt-label"))
        y += 20
        for step in range(RANKS):
            x = LEFT + WIDE * (step + 0.5)
            parts.append(text(x, y, f"step {step}", "xt-tick", "middle"))
        parts.append(text(WIDTH - 4, y, "in all", "xt-tick", "end"))
        y += 7
        found = runs.remembered(met, RANKS, balance, TOKENS)
        counts = [[[s for s, _, _ in one].count(i) for i in range(RANKS)]
                  for one in found]  # fmt: skip
        for rank, row in enumerate(counts):
            parts.append(text(4, y + 18, f"rank {rank}", "xt-tick"))
            for step, pairs in enumerate(row):
                parts += cell(
                    LEFT + WIDE * step, y, WIDE - GAP, HIGH - GAP, 0, str(pairs), low=5,
                    opacity=0.08 + 0.47 * pairs / most, radius=2,
                    hover=f"rank {rank}, step {step}: {pairs} pairs",
                )  # fmt: skip
            parts.append(text(WIDTH - 4, y + 17, str(sum(row)), "xt-label", "end"))
            y += HIGH
        path = list(map(max, zip(*counts, strict=True)))
        parts.append(text(4, y + 18, "slowest", "xt-tick"))
        for step, pairs in enumerate(path):
            middle = LEFT + WIDE * step + (WIDE - GAP) / 2
            parts.append(text(middle, y + 17, str(pairs), "xt-label", "middle"))
        parts.append(text(WIDTH - 4, y + 17, str(sum(path)), "xt-label", "end"))
        y += HIGH + 26
    title = f"Causal work of {TOKENS} tokens on {RANKS} ranks"
    words = "Pairs of a query and a key, counted by rank and step, for three balances"
    return document(WIDTH, y - 20, parts, title, words)


@REGISTRY
def who_computes(balance: str) -> str:
    """The attention matrix in the order of the sequence, by who computes it."""
    edge, left, top = 19.0, 74.0, 44.0
    parts = [text(4, 16, f'balance="{balance}"', "xt-label")]
    for rank in range(RANKS):
        x = 136 + 62 * rank
        parts.append(rect(x, 5, 13, 13, rank, opacity=0.85, radius=2))
        parts.append(text(x + 18, 16, f"rank {rank}", "xt-tick"))
    parts.append(text(left, 37, "keys", "xt-tick"))
    parts.append(text(4, top + 14, "queries", "xt-tick"))
    for rank, pairs in enumerate(runs.remembered(met, RANKS, balance, TOKENS)):
        for _, q, k in pairs:
            parts.append(
                rect(left + edge * k, top + edge * q, edge - 2, edge - 2, rank,
                     opacity=0.85, radius=2, hover=f"query {q}, key {k}: rank {rank}")
            )  # fmt: skip
    title = f"Who computes which pair, {TOKENS} tokens on {RANKS} ranks, {balance}"
    high = int(top + edge * TOKENS + 6)
    return document(WIDTH, high, parts, title, "Each pair of a causal mask")
