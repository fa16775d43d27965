"""The picture of a model on context ranks: which tokens a rank computes with."""

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel

from ... import runs
from ...figures import REGISTRY
from ...svg import document, rank_key, rect, text

BALANCES = ("none", "striped", "zigzag")
RANKS, TOKENS = 4, 16
WIDTH, LEFT, CELL = 400, 66, 20


def positions_of_layer(balance: str) -> list[int]:
    """The positions that the first layer of this rank is given."""
    mesh = init_mesh((dist.get_world_size(),), ("context",))
    config = XtrainConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = XtrainModel(config, mesh, context_balance=balance)
    seen: list[int] = []
    model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.extend(args[1].tolist())
    )
    model(torch.zeros(1, TOKENS, dtype=torch.long))
    return seen


@REGISTRY
def tokens_of_context_ranks() -> str:
    """The sequence once for each balance, every token in the colour of its rank."""
    parts, y, words = rank_key(RANKS), 34, []
    for balance in BALANCES:
        found = runs.remembered(positions_of_layer, RANKS, balance)
        parts.append(text(LEFT - 8, y + 14, balance, "xt-tick", "end"))
        for rank, held in enumerate(found):
            for token in held:
                x = LEFT + CELL * token
                parts.append(rect(x, y, CELL - 2, CELL - 2, rank,
                                  hover=f"token {token}, rank {rank}"))  # fmt: skip
                middle = x + (CELL - 2) / 2
                parts.append(text(middle, y + 34, str(token), "xt-tick", "middle"))
        words.append(f"{balance}: rank 0 has {found[0]}")
        y += 52
    title = "Which tokens of a sequence each context rank has"
    return document(WIDTH, y, parts, title, "; ".join(words))
