"""The classic bugs of lc6: broken twins fail the checks that the right code passes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from snippets.wrong.lc6 import (
    angles_in_16_bits,
    dtypes,
    if_no_grad,
    local_positions,
    loss_scale,
    masked_block,
    masked_row,
    merged_heads,
    normalizer,
    not_home,
    shift_inside,
    stale_keys,
    transposed,
)
from torch import Tensor, nn

from tests.snippets.gallery import all_fail, drawn, ranks, same, some_fail
from xtrain import context_parallel as library
from xtrain.tensor_parallel.rope import rope_cos_sin
from xtrain.whiteboard.context_parallel.flash_attention_backward import (
    flash_attention_backward,
)
from xtrain.whiteboard.context_parallel.online_softmax import online_softmax
from xtrain.whiteboard.context_parallel.ring_attention_backward import (
    ring_attention_backward,
)
from xtrain.whiteboard.context_parallel.ring_attention_forward import (
    ring_attention_forward,
)

SOFTMAX = "xtrain.whiteboard.context_parallel.online_softmax:online_softmax"
FLASH_BACK = (
    "xtrain.whiteboard.context_parallel.flash_attention_backward"
    ":flash_attention_backward"
)
RING = (
    "xtrain.whiteboard.context_parallel.ring_attention_forward:ring_attention_forward"
)
RING_BACK = (
    "xtrain.whiteboard.context_parallel.ring_attention_backward:ring_attention_backward"
)
LIBRARY_FLASH = "xtrain.context_parallel.flash:flash_attention_backward"
LIBRARY_SOFTMAX = "xtrain.context_parallel.online_softmax:online_softmax"
LIBRARY_RING = "xtrain.context_parallel.ring_attention:ring_attention"
POSITIONS = "xtrain.context_parallel.balance:local_positions"
SHARD = "xtrain.context_parallel.balance:shard_sequence"


# --------------------------------------------------------------------- the attention


def gradients_are_torchs(backward, queries, keys, head_dim=4, of=("dq", "dk", "dv")):
    """`backward(dO, q, k, v)` of one head, [S, D] and [T, D]."""
    q, dO = drawn(1, queries, head_dim).requires_grad_(), drawn(4, queries, head_dim)
    k, v = (drawn(s, keys, head_dim).requires_grad_() for s in (2, 3))
    out = F.scaled_dot_product_attention(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), dO)
    with torch.no_grad():
        found = backward(dO, q, k, v)
    for name, x, right in zip(("dq", "dk", "dv"), found, expected, strict=True):
        if name in of:
            same(x, right, name)


def flash(forward, backward, dO, q, k, v):
    dO, q, k, v = (x[None, None] for x in (dO, q, k, v))
    out, lse = forward(q, k, v, False)
    return [x[0, 0] for x in backward(dO, q, k, v, out, lse, False)]


FLASHES = [
    partial(flash, library.flash_attention_forward, backward)
    for backward in (library.flash_attention_backward, flash_attention_backward)
]


@pytest.mark.verifies(FLASH_BACK, LIBRARY_FLASH)
def test_the_scores_gradient_is_transposed_for_dk_alone_and_scaled_for_both():
    check = gradients_are_torchs
    wrong = partial(transposed.backward, rule=transposed.transposed)
    unscaled = partial(transposed.backward, rule=transposed.unscaled)
    for right in (partial(transposed.backward, rule=transposed.right), *FLASHES):
        for queries, keys in ((6, 6), (6, 3), (1, 5)):
            check(right, queries, keys)
    for twin in (wrong, unscaled):
        check(twin, 6, 6, of=("dv",))  # what hides it
        for name in ("dq", "dk"):
            with pytest.raises(AssertionError, match=name):
                check(twin, 6, 6, of=(name,))
    with pytest.raises(RuntimeError):  # what shows it at once
        check(wrong, 6, 3)
    check(unscaled, 6, 3, head_dim=1)  # what hides it: the scale is 1


def heads_are_torchs(merge, heads, length) -> None:
    """nn.MultiheadAttention with our own merging of the heads."""
    module = nn.MultiheadAttention(6, heads, bias=False, batch_first=True).double()
    with torch.no_grad():
        module.in_proj_weight.copy_(drawn(1, 18, 6))
    x = drawn(2, 2, length, 6)
    projected = F.linear(x, module.in_proj_weight).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in projected)
    out = F.linear(
        merge(F.scaled_dot_product_attention(q, k, v)), module.out_proj.weight
    )
    same(out, module(x, x, x, need_weights=False)[0])


def test_heads_are_transposed_before_they_are_merged():
    for heads, length in ((1, 5), (2, 5), (3, 4), (2, 1)):
        heads_are_torchs(merged_heads.merged_right, heads, length)
        if heads == 1 or length == 1:  # what hides it
            heads_are_torchs(merged_heads.merged, heads, length)
        else:
            with pytest.raises(AssertionError):
                heads_are_torchs(merged_heads.merged, heads, length)


def in_blocks(probabilities, blocks, dO, q, k, v):
    """The twin knows no scale, so q is scaled, and then dq."""
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    dq, dk, dv = normalizer.backward(
        dO, q * scale, k, v, out, lse, probabilities, blocks
    )
    return dq * scale, dk, dv


def flash_in_blocks(backward, blocks, dO, q, k, v):
    dO, q, k, v = (x[None, None] for x in (dO, q, k, v))
    out, lse = library.flash_attention_forward(q, k, v, False)
    parts = zip(k.chunk(blocks, 2), v.chunk(blocks, 2), strict=True)
    found = [backward(dO, q, *kv, out, lse, False) for kv in parts]
    dq, dk, dv = zip(*found, strict=True)
    return [x[0, 0] for x in (sum(dq), torch.cat(dk, 2), torch.cat(dv, 2))]


@pytest.mark.verifies(FLASH_BACK, LIBRARY_FLASH)
def test_probabilities_are_those_over_all_keys():
    for blocks in (1, 2, 4):
        check = partial(gradients_are_torchs, queries=6, keys=8)
        check(partial(in_blocks, normalizer.of_all_keys, blocks))
        for backward in (library.flash_attention_backward, flash_attention_backward):
            check(partial(flash_in_blocks, backward, blocks))
        for name in ("dq", "dk", "dv"):
            with pytest.raises(AssertionError, match=name):
                check(partial(in_blocks, normalizer.not_normalized, blocks), of=(name,))
            wrong = partial(in_blocks, normalizer.of_the_block, blocks)
            if blocks == 1:  # what hides it
                check(wrong, of=(name,))
            else:
                with pytest.raises(AssertionError, match=name):
                    check(wrong, of=(name,))


# ------------------------------------------------------------------- what is not seen


def hidden_blocks_count_for_nothing(softmax, hidden, block_size) -> None:
    scores, values = drawn(1, 3, 8), drawn(2, 8, 2)
    scores[1, hidden] = -torch.inf
    same(softmax(scores, values, block_size), scores.softmax(-1) @ values)


@pytest.mark.verifies(SOFTMAX, LIBRARY_SOFTMAX)
def test_a_first_block_that_is_masked_leaves_no_nan():
    check = hidden_blocks_count_for_nothing
    for hidden in (slice(0), slice(4, 8), slice(0, 1), slice(0, 2), slice(0, 6)):
        for block_size in (1, 2, 8):
            for right in (online_softmax, library.online_softmax):
                check(lambda *args, f=right: f(*args)[0], hidden, block_size)
            seen_first = hidden.start != 0 or hidden.stop < block_size
            if hidden == slice(0) or hidden.start == 4 or seen_first:  # what hides it
                check(masked_block.online_softmax, hidden, block_size)
            else:
                with pytest.raises(AssertionError):
                    check(masked_block.online_softmax, hidden, block_size)


def padding_changes_nothing(attend) -> None:
    """A row that does not count, with keys and without."""
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    counts = torch.tensor([True, True, True, False])
    loss, grad = masked_row.trained(masked_row.attention, seen, counts)
    seen[3] = False
    found, found_grad = masked_row.trained(attend, seen, counts)
    assert found == loss  # that does not show it
    torch.testing.assert_close(found_grad, grad)


def by_online_softmax(softmax, q, k, v, seen):
    """A form without a backward: probabilities are constants of dW here."""
    scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
    probabilities = softmax(scores, torch.eye(len(k)), 2)[0]
    return probabilities @ v


@pytest.mark.verifies(SOFTMAX, LIBRARY_SOFTMAX)
def test_a_row_without_keys_gives_no_nan_to_the_weights():
    padding_changes_nothing(masked_row.attention_right)
    for softmax in (online_softmax, library.online_softmax):
        padding_changes_nothing(partial(by_online_softmax, softmax))
    with pytest.raises(AssertionError):
        padding_changes_nothing(masked_row.attention)


def remembers_nothing(step, trained: bool = True) -> None:
    assert if_no_grad.kept(step, 8, trained) == [0] * 8


def test_decoding_without_gradients_remembers_nothing():
    remembers_nothing(if_no_grad.decoded_right)
    with pytest.raises(AssertionError):
        remembers_nothing(if_no_grad.decoded)
    remembers_nothing(if_no_grad.decoded, trained=False)  # what hides it


# ---------------------------------------------------------------------------- the ring


def ring_is_one_process(ring, causal, of=("out", "dq", "dk", "dv"), dtype=None) -> None:
    """`ring(q, k, v, grad, causal)` gives the output, dq, dk and dv of one head."""
    rank, size = ranks()
    dtype = dtype or torch.float64
    q, k, v, grad = (drawn(s, 1, 1, 6 * size, 4).to(dtype) for s in (1, 2, 3, 4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    whole = [out, *torch.autograd.grad(out, leaves, grad.double())]
    mine = [x.chunk(size, 2)[rank] for x in (q, k, v, grad)]
    found = ring(*mine, causal)
    dist.barrier()  # nobody leaves because another one has failed
    allowed = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 0.05)
    names = ("out", "dq", "dk", "dv")
    for name, x, full in zip(names, found, whole, strict=True):
        if name in of:
            assert x.dtype == dtype, (name, x.dtype)
            error = (x.double() - full.chunk(size, 2)[rank]).abs().max()
            assert error < allowed, (name, error)


def on_the_whiteboard(q, k, v, grad, causal):
    out, lse = ring_attention_forward(q, k, v, causal)
    return out, *ring_attention_backward(grad, q, k, v, out, lse, causal)


def of_the_library(q, k, v, grad, causal):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = library.ring_attention(q, k, v, causal)
    return out, *torch.autograd.grad(out, (q, k, v), grad)


def twin_of_one_head(go_home, q, k, v, grad, causal):
    """The twin knows neither scale nor mask."""
    out, lse = ring_attention_forward(q, k, v, causal)
    scale = q.shape[-1] ** -0.5
    tensors = [x[0, 0] for x in (grad, q * scale, k, v, out, lse)]
    dq, dk, dv = not_home.backward(*tensors, go_home)
    return out, *(x[None, None] for x in (dq * scale, dk, dv))


@pytest.mark.verifies(RING, RING_BACK, LIBRARY_RING)
def test_the_gradients_of_keys_take_a_hop_more_than_the_keys(worlds):
    check, wrong = ring_is_one_process, partial(twin_of_one_head, False)
    for size in (1, 2, 3, 4):
        for right in (on_the_whiteboard, of_the_library):
            worlds[size].run(check, right, False)
            worlds[size].run(check, right, True)
        worlds[size].run(check, partial(twin_of_one_head, True), False)
        worlds[size].run(check, wrong, False, ("out", "dq"))  # what hides it
        for name in ("dk", "dv"):
            if size == 1:
                worlds[size].run(check, wrong, False, (name,))
            else:
                all_fail(worlds[size], check, wrong, False, (name,))


def received(copied, q, k, v, grad, causal):
    return stale_keys.attention(q, k, v, grad, copied)


@pytest.mark.verifies(RING_BACK, LIBRARY_RING)
def test_backward_begins_with_the_keys_of_its_own_rank(worlds):
    check, wrong = ring_is_one_process, partial(received, False)
    worlds[1].run(check, wrong, True)  # what hides it
    for size in (2, 3):
        for right in (partial(received, True), on_the_whiteboard, of_the_library):
            worlds[size].run(check, right, True)
        worlds[size].run(check, wrong, True, ("out",))  # what hides it
        for name in ("dq", "dk", "dv"):
            all_fail(worlds[size], check, wrong, True, (name,))


def sum_is_exact(summed, dtype) -> None:
    blocks = [torch.full((3,), float(n)).to(dtype) for n in (1, 2, 4)]
    same(summed(blocks), torch.full((3,), 7.0))
    assert blocks[0][0] == 1, "blocks written"


def test_a_sum_that_is_in_fp32_already_is_no_copy():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sum_is_exact(dtypes.summed_right, dtype)
        if dtype != torch.float32:  # what hides it
            sum_is_exact(dtypes.summed, dtype)
        else:
            with pytest.raises(AssertionError):
                sum_is_exact(dtypes.summed, dtype)


def cast_back(cast, q, k, v, grad, causal):
    out, dq, dk, dv = on_the_whiteboard(q, k, v, grad, causal)
    dtype = out.dtype
    return out, cast(dq), dk.to(dtype), dv.to(dtype)


def given_back_in(dtype, dq):
    return dtypes.given_back_right(dq, dtype)


@pytest.mark.verifies(RING, RING_BACK, LIBRARY_RING)
def test_dq_has_the_dtype_and_the_digits_of_q(worlds):
    check = ring_is_one_process
    every = ("out", "dq", "dk", "dv")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        right = partial(cast_back, partial(given_back_in, dtype))
        for ring in (right, of_the_library):
            worlds[2].run(check, ring, True, every, dtype)
        wrong = partial(cast_back, dtypes.given_back)
        if dtype == torch.bfloat16:  # what hides it
            worlds[2].run(check, wrong, True, every, dtype)
        else:
            all_fail(worlds[2], check, wrong, True, ("dq",), dtype)


# ----------------------------------------------------------------------- the positions


def tokens_are_at_their_places(positions_of, balance) -> None:
    _, size = ranks()
    q, k, v = (drawn(s, 4 * size, 2) for s in (1, 2, 3))
    tokens = torch.arange(4 * size)
    scores = local_positions.turned(q, tokens) @ local_positions.turned(k, tokens).mT
    seen = torch.ones(4 * size, 4 * size, dtype=torch.bool).tril()
    whole = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    mine = [library.shard_sequence(x, 0, balance) for x in (q, k, v, whole)]
    found = local_positions.attention(*mine[:3], balance, positions_of)
    dist.barrier()
    same(found, mine[3])


@pytest.mark.verifies(POSITIONS, SHARD)
def test_positions_are_those_of_the_whole_sequence(worlds):
    check, twin = tokens_are_at_their_places, local_positions
    for size in (1, 2, 3):
        world = worlds[size]
        for right in (twin.of_the_cut, library.local_positions):
            world.run(check, right, "none")
            world.run(check, right, "zigzag")
        world.run(check, twin.of_a_run, "none")  # what hides it
        some_fail(world, range(1, size), check, twin.from_zero, "none")
        if size > 1:
            all_fail(world, check, twin.from_zero, "zigzag")
            all_fail(world, check, twin.of_a_run, "zigzag")


def all_next_tokens_are_counted(rule, size) -> None:
    text = torch.arange(8 * size)
    pairs = []
    for rank in range(size):
        tokens, labels = rule(text, rank, size)
        pairs += zip(tokens.tolist(), labels.tolist(), strict=True)
    counted = sorted((token, label) for token, label in pairs if label != -100)
    assert counted == [(t, t + 1) for t in range(8 * size - 1)]


def cut_by_the_library() -> tuple[Tensor, Tensor]:
    text = torch.arange(8 * dist.get_world_size())
    labels = shift_inside.shifted(text)
    return tuple(library.shard_sequence(x, 0, "zigzag") for x in (text, labels))


@pytest.mark.verifies(SHARD)
def test_labels_are_shifted_before_the_sequence_is_cut(worlds):
    for size in (1, 2, 4):
        all_next_tokens_are_counted(shift_inside.shift_then_cut, size)
        found = worlds[size].run(cut_by_the_library)
        all_next_tokens_are_counted(lambda text, rank, _, f=found: f[rank], size)
    all_next_tokens_are_counted(shift_inside.cut_then_shift, 1)  # what hides it
    for size in (2, 4):
        with pytest.raises(AssertionError):
            all_next_tokens_are_counted(shift_inside.cut_then_shift, size)


def scores_know_the_distance_alone(table, dtype, positions) -> None:
    scores = angles_in_16_bits.scores_at(5, torch.tensor(positions), table, dtype)
    assert (scores - scores[0]).abs().max() < 0.1, scores


def table_of_the_library(positions, frequencies, dtype):
    return rope_cos_sin(positions, 8)


@pytest.mark.verifies("xtrain.tensor_parallel.rope:rope_cos_sin")
def test_angles_are_computed_in_more_than_16_bits():
    check, near, far = scores_know_the_distance_alone, [10, 100], [10, 1_000, 100_000]
    for dtype in (torch.float32, torch.bfloat16):
        for table in (angles_in_16_bits.cos_sin_right, table_of_the_library):
            check(table, dtype, far)
    check(angles_in_16_bits.cos_sin, torch.float32, far)  # what hides it
    check(angles_in_16_bits.cos_sin, torch.bfloat16, near)
    with pytest.raises(AssertionError):
        check(angles_in_16_bits.cos_sin, torch.bfloat16, far)


# ---------------------------------------------------------------------------- the loss


def loss_is_of_all_tokens(rule, counting) -> None:
    rank, size = ranks()
    weight, x = drawn(1, 3).requires_grad_(), drawn(2, 4 * size, 3)
    counts = torch.arange(4 * size) < counting
    whole = (x @ weight).square()[counts].mean()
    (right,) = torch.autograd.grad(whole, weight)
    mine = x.chunk(size)[rank], counts.chunk(size)[rank]
    loss, grad = loss_scale.step(weight, *mine, rule)
    dist.barrier()
    same(loss, whole.detach())
    same(grad, right)


def test_the_loss_is_divided_once_by_the_tokens_of_all_ranks(worlds):
    check, twin = loss_is_of_all_tokens, loss_scale
    for rule in (twin.mean_then_sum, twin.mean_then_average):
        worlds[1].run(check, rule, 3)  # what hides it
    for size in (2, 3):
        uneven = 4 * size - 3
        for counting in (4 * size, uneven):
            worlds[size].run(check, twin.share_of_all, counting)
            all_fail(worlds[size], check, twin.mean_then_sum, counting)
        worlds[size].run(check, twin.mean_then_average, 4 * size)  # what hides it
        all_fail(worlds[size], check, twin.mean_then_average, uneven)
