"""What the errata page of lc6 says: counted in runs, and run with and without it."""

import pytest
import torch

from tests.context_parallel.attention_cases import qkv
from tests.context_parallel.test_counted import Largest
from tests.devices import randn
from xtrain.context_parallel import (
    all_gather_attention,
    local_positions,
    online_softmax,
    ring_attention,
    shard_sequence,
    ulysses_attention,
    unshard_sequence,
)
from xtrain.context_parallel.balance import block_of, positions_of
from xtrain.context_parallel.online_softmax import merge, softmax_block
from xtrain.plan import context_bytes, critical_pairs
from xtrain.testing.saved import SavedTensors
from xtrain_docs.lectures.lc6.balance import met

BALANCE = "xtrain.context_parallel.balance"
SOFTMAX = "xtrain.context_parallel.online_softmax"
BALANCES = ("none", "striped", "zigzag")


@pytest.fixture(autouse=True)
def on_gloo(xtrain_worlds):
    """Skip elsewhere: these are small runs of gloo on CPUs."""
    if xtrain_worlds.device != "cpu" or xtrain_worlds.backend not in (
        "gloo",
        "xtrain-virtual",
    ):
        pytest.skip("runs of gloo on CPUs")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------ e79, e80: bytes of a ring

D = 8 * 4  # a key head in bytes: `test_what_sockets_send_is_the_formula` counts them


@pytest.mark.verifies("xtrain.plan.context_parallel:context_bytes")
def test_a_rank_of_a_ring_sends_2_of_s_d_forward_and_6_with_backward_at_most():
    for ranks in (2, 4, 8):
        unit = 64 * 2 * D  # S d, two key heads
        forward, backward = context_bytes("ring", 64 // ranks, 2, 2, 8, ranks,
                                          itemsize=4)  # fmt: skip
        assert forward == 2 * (ranks - 1) * unit // ranks < 2 * unit
        assert backward == forward + 2 * unit < 4 * unit
    grouped = context_bytes("ring", 8, 4, 1, 8, 2, itemsize=4)
    assert grouped[0] == 2 * 8 * D  # of the one key head, not of four heads


def test_with_a_fixed_sequence_bytes_stay_and_work_falls():
    """(S, N), (S, 2 N), (2 S, 2 N): only the last keeps work per byte."""

    def of(tokens: int, ranks: int) -> tuple[int, int]:
        local = tokens // ranks
        sent = context_bytes("ring", local, 1, 1, 8, ranks, itemsize=4)[0]
        return sent, critical_pairs("zigzag", ranks, local)

    first, strong, weak = of(64, 2), of(64, 4), of(128, 4)
    assert strong[0] > first[0]  # more bytes of each rank
    assert strong[1] == first[1] / 2
    assert weak[0] == 2 * strong[0]
    per_byte = [pairs / nbytes for nbytes, pairs in (first, strong, weak)]
    assert per_byte[1] < 0.4 * per_byte[0]
    assert per_byte[2] > 1.9 * per_byte[1]


# --------------------------------------------------------------------- e81: balance


@pytest.mark.verifies(f"{BALANCE}:block_of")
@pytest.mark.parametrize("balance", BALANCES)
def test_all_ranks_together_compute_each_pair_of_the_mask_once(world, balance):
    assert block_of("striped", 0, 1, 1, causal=True) is None  # shifted: nothing is left
    for ranks, tokens in ((3, 12), (4, 16)):
        found = world(ranks).run(met, balance, tokens)
        pairs = sorted((q, k) for one in found for _, q, k in one)
        assert pairs == [(q, k) for q in range(tokens) for k in range(q + 1)]


def test_reordering_keys_and_values_alone_changes_no_ranks_work():
    """Queries in runs; keys go round in any order, even dealt out like cards."""
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(16, generator=generator, device="cpu")
    queries = torch.arange(16).view(4, 4)
    for order in (torch.arange(16), shuffled):
        keys = order.view(4, 4)
        blocks = queries[:, None, :, None] >= keys[None, :, None, :]
        assert blocks.sum((1, 2, 3)).tolist() == [10, 26, 42, 58]
    striped = torch.arange(16).view(4, 4).T
    blocks = striped[:, None, :, None] >= striped[None, :, None, :]
    assert blocks.sum((1, 2, 3)).tolist() == [28, 32, 36, 40]


def parts_and_whole(balance: str, local: int):
    """What a rank holds of 0, 1, 2, ...; and gathered; and gradients of both ways."""
    size = torch.distributed.get_world_size()
    whole = torch.arange(float(local * size)).repeat(2, 1)
    mine = shard_sequence(whole, 1, balance)
    back = unshard_sequence(mine, 1, balance)
    leaf = whole.clone().requires_grad_()
    part = shard_sequence(leaf, 1, balance)
    (part * mine).sum().backward()
    cut = mine.clone().requires_grad_()
    (unshard_sequence(cut, 1, balance) * whole).sum().backward()
    positions = local_positions(local, balance)
    return mine, back, leaf.grad, cut.grad, positions


@pytest.mark.verifies(f"{BALANCE}:shard_sequence", f"{BALANCE}:unshard_sequence")
@pytest.mark.verifies(f"{BALANCE}:local_positions", f"{BALANCE}:positions_of")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tokens_are_dealt_out_and_come_back_in_order(world, ranks):
    for balance in BALANCES:
        whole = torch.arange(4.0 * ranks).repeat(2, 1)
        found = world(ranks).run(parts_and_whole, balance, 4)
        for rank, (mine, back, of_whole, of_part, positions) in enumerate(found):
            held = positions_of(rank, ranks, 4, balance)
            assert torch.equal(positions, held)
            assert torch.equal(mine, held.double().float().repeat(2, 1))
            assert torch.equal(back, whole)
            assert torch.equal(of_whole, whole)  # every rank has the whole gradient
            assert torch.equal(of_part, mine)
        everything = torch.cat([one[4] for one in found])
        assert everything.sort().values.tolist() == list(range(4 * ranks))
    assert [positions_of(r, 2, 4, "zigzag").tolist() for r in (0, 1)] == [
        [0, 1, 6, 7], [2, 3, 4, 5],
    ]  # fmt: skip


# ---------------------------------------------- e82, e83: online softmax on two levels

K = 12


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return randn(*shape, generator=generator)


@pytest.mark.verifies(f"{SOFTMAX}:merge", f"{SOFTMAX}:online_softmax")
def test_tiles_inside_a_device_and_devices_merge_by_one_rule():
    """Each of 3 devices goes through its own keys in tiles; then the devices merge."""
    scores, values = 5 * numbers(3, K), numbers(3, K, 4)
    state = None
    for device in range(3):
        own = slice(4 * device, 4 * device + 4)
        part = online_softmax(scores[:, None, own], values[:, own], block_size=3)
        state = merge(state, part)
    assert state is not None
    close(state[0], scores.softmax(-1).unsqueeze(-2) @ values)


def test_maximum_and_sum_do_not_give_the_output():
    """The same largest score and sum of exponentials, and another output."""
    scores, values = numbers(1, K), numbers(1, K, 4)
    other = values.flip(1)
    states = [(scores.max(), scores.exp().sum())] * 2
    outputs = [scores.softmax(-1) @ v for v in (values, other)]
    assert states[0] == states[1]
    assert (outputs[0] - outputs[1]).abs().max() > 0.1
    _, lse = softmax_block(scores, values[0])
    close(lse, scores.max() + (scores - scores.max()).exp().sum().log().view(1))


def tensors_of(attention) -> list[float]:
    """Kept for backward, and the largest of each pass, in multiples of a rank's q."""
    q, k, v, grad = (t.float() for t in qkv(8, 8, 16))
    with SavedTensors() as saved, Largest() as forward:
        out = attention(*(t.requires_grad_() for t in (q, k, v)))
    with Largest() as backward:
        out.backward(grad)
    found = saved.nbytes() / 4, forward.elements, backward.elements
    return [n / q.numel() for n in found]


def test_no_tensor_of_a_ring_grows_with_the_number_of_ranks(world):
    """16 tokens on each rank; kept are q, k, v, the output and a number a query."""
    for ranks in (2, 4):
        for attention, largest in (
            (ring_attention, 2), (all_gather_attention, 2 * ranks),
            (ulysses_attention, 1),
        ):  # fmt: skip
            found = world(ranks).run(tensors_of, attention)[0]
            assert found == [4 + 1 / 6, largest, largest], (attention, ranks)
