"""Combine: rows return to their ranks; a token is the weighted sum of its k copies.

    by expert  ->  by sender, as they came  -- all-to-all -->  in the order they left
    [N, H]  ->  [T, k, H]  times the gates [T, k], summed  ->  [T, H]

Computes:   the output of each token, by the map of `dispatch` backwards.
Sends:      the rows that came from other ranks; no counts, since both sides know them.
Leaves out: backward, which is `dispatch` and a dot product per gate, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def combine(rows_NH: Tensor, gates_Tk: Tensor, plan: tuple[Any, ...]) -> Tensor:
    """The outputs of this rank's experts, the gates of its tokens, dispatch's map."""
    order, place, sent, received, group = plan
    back = rows_NH.new_empty(rows_NH.shape)
    back[place] = rows_NH  # to position place[i], where dispatch has taken it from
    home = rows_NH.new_empty(sum(sent), rows_NH.shape[1])
    dist.all_to_all_single(home, back, sent, received, group=group)
    copies = torch.empty_like(home)
    copies[order] = home  # k rows in a row for each token
    weights = gates_Tk.unsqueeze(-1).to(rows_NH.dtype)
    return (copies.unflatten(0, gates_Tk.shape) * weights).sum(1)
