"""A token travels once to each rank that has experts of it, and one row comes back.

    token    its experts   rank 0 (0 1)   rank 1 (2 3)
    0        0 1           one row        -             instead of two rows
    1        1 2           one row        one row

    dispatch  the token, the numbers of its k experts and their gates
    compute   the rank is a mixture on one device for what it gets: it weights and sums
    combine   one row for each row that came, and the token's rank adds them up

In backward the gradients of gates return with those of the tokens. Instead of k rows
a token sends as many as the ranks it reaches, each longer by k numbers and k gates. If
any k of E experts are equally likely, it reaches e (1 - C(E - E/e, k) / C(E, k)) of e
ranks: 5.4 of 8 for 8 of 64 experts. In 16 bits sums are rounded on the experts' rank,
before they are sent.

Source: DeepSeek-AI, DeepEP, 2025; DeepSeek-V3, 2024, section 3.2.2.

Shapes: T tokens, H hidden, k experts of a token, N rows received, L experts of a rank.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.expert_parallel.dispatch import (
    combine_sums,
    dispatch,
    plan_once_a_rank,
    send_copies,
)
from xtrain.expert_parallel.experts import RoutedExperts
from xtrain.expert_parallel.routing import Routing


def once_a_rank(
    x_TH: Tensor,
    routing: Routing,
    experts: RoutedExperts,
    group: ProcessGroup | None = None,
    collectives: Collectives = TORCH,
) -> Tensor:
    """What the experts of all ranks add to this rank's tokens: [T, H].

    Args:
        experts: this rank's; called with rows [N, H] and their routing among them.
            Of the places that the routing has for a rank, the last may have none.
    """
    rank, size = rank_and_size(group)
    local = routing.num_experts // size
    plan = plan_once_a_rank(routing, group, collectives)
    chosen_Tk = routing.experts_Tk.masked_fill(~routing.kept_Tk, -1).int()
    x_NH = dispatch(x_TH, plan)
    gates_Nk, own_Nk = (
        send_copies(entries[plan.tokens_M], plan)
        for entries in (routing.gates_Tk, chosen_Tk)
    )
    own_Nk = own_Nk.long() - rank * local
    kept_Nk = (own_Nk >= 0) & (own_Nk < local)
    scores_1L = gates_Nk.detach().new_zeros(1, experts.num_experts)
    scores_NL = scores_1L.expand(len(x_NH), -1)
    own_Nk = own_Nk.masked_fill(~kept_Nk, 0)
    here = Routing(own_Nk, gates_Nk, scores_NL, scores_NL, kept_Nk)
    return combine_sums(experts(x_NH, here), len(x_TH), plan)
