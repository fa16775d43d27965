"""Context parallelism's bytes, work and overlap: published figures, and real runs."""

import pytest
import torch
import torch.distributed as dist

import xtrain.backends  # noqa: F401  (registers the sockets)
from xtrain.comm import CommLedger
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)
from xtrain.plan import (
    context_bytes,
    critical_pairs,
    hiding_tokens,
    ideal_pairs,
    pairs_by_step,
)
from xtrain.plan.context_parallel import pairs_of_block

PLAN = "xtrain.plan.context_parallel"
BYTES = f"{PLAN}:context_bytes"
TERA, GB = 1e12, 1e9


# -------------------------------------------------------------------------- work


def seen(balance: str, ranks: int, tokens: int) -> list[list[int]]:
    """Pairs counted one by one, by the global positions."""

    def positions(rank: int) -> list[int]:
        if balance == "none":
            return [rank * tokens + i for i in range(tokens)]
        if balance == "striped":
            return [rank + i * ranks for i in range(tokens)]
        half = tokens // 2
        late = (2 * ranks - 1 - rank) * half
        return [s + i for s in (rank * half, late) for i in range(half)]

    return [
        [
            sum(k <= q for q in positions(r) for k in positions((r - step) % ranks))
            for step in range(ranks)
        ]
        for r in range(ranks)
    ]


@pytest.mark.verifies(f"{PLAN}:pairs_by_step", f"{PLAN}:pairs_of_block")
@pytest.mark.parametrize("balance", ["none", "striped", "zigzag"])
def test_closed_forms_of_each_block_are_pairs_counted_one_by_one(balance):
    for ranks in (1, 2, 3, 4, 8):
        for tokens in (2, 4, 6):
            expected = seen(balance, ranks, tokens)
            assert pairs_by_step(balance, ranks, tokens) == expected
            total = ranks * tokens * (ranks * tokens + 1) // 2
            assert sum(map(sum, expected)) == total


@pytest.mark.verifies(f"{PLAN}:pairs_by_step", f"{PLAN}:critical_pairs")
def test_sixteen_tokens_on_four_ranks():
    expected = {
        "none": ([10, 26, 42, 58], 58),
        "striped": ([28, 32, 36, 40], 40),
        "zigzag": ([34] * 4, 34),
    }
    for balance, (work, path) in expected.items():
        assert [sum(row) for row in pairs_by_step(balance, 4, 4)] == work
        assert critical_pairs(balance, 4, 4) == path
    assert ideal_pairs(4, 4) == 34


@pytest.mark.verifies(f"{PLAN}:critical_pairs", f"{PLAN}:ideal_pairs")
@pytest.mark.parametrize(
    ("ranks", "tokens", "paths"), [(4, 8, (228, 144, 132)), (8, 4, (122, 80, 66))]
)
def test_critical_paths_of_other_sizes(ranks, tokens, paths):
    found = [critical_pairs(b, ranks, tokens) for b in ("none", "striped", "zigzag")]
    assert tuple(found) == paths
    assert ideal_pairs(ranks, tokens) == paths[2]


@pytest.mark.verifies(f"{PLAN}:critical_pairs", f"{PLAN}:ideal_pairs")
def test_a_thousand_tokens_on_eight_ranks_and_the_limit():
    ideal = ideal_pairs(8, 128)
    over = [critical_pairs(b, 8, 128) / ideal for b in ("none", "striped", "zigzag")]
    assert over == pytest.approx([1.874, 1.0068, 1.0], abs=5e-4)
    long = 10**6
    # zhuzilin's README measures 52 to 54 % on 8 GPUs: the limit is N / (2N - 1)
    assert ideal_pairs(8, long) / critical_pairs("none", 8, long) == pytest.approx(
        8 / 15, rel=1e-5
    )


@pytest.mark.verifies(f"{PLAN}:pairs_of_block", f"{PLAN}:check_split")
def test_a_split_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="balance='ring' is not one of"):
        pairs_of_block("ring", 0, 0, 4)
    with pytest.raises(ValueError, match="tokens=3 of a rank are not two halves"):
        pairs_of_block("zigzag", 0, 1, 3)
    assert pairs_of_block("striped", 0, 1, 3) == 3
    with pytest.raises(ValueError, match="tokens=0"):
        pairs_by_step("none", 2, 0)


# ----------------------------------------------------------------------- overlap


@pytest.mark.verifies(f"{PLAN}:hiding_tokens")
@pytest.mark.parametrize(
    ("tflops", "gbytes", "published", "six"),
    [
        (312, 300, 1.0e3, 6.2e3),  # A100 on NVLink
        (123, 112, 1.1e3, 6.6e3),  # TPU v3
        (275, 268, 1.0e3, 6.2e3),  # TPU v4
        (196, 186, 1.1e3, 6.3e3),  # TPU v5e
        (312, 12.5, 24.5e3, 149.5e3),  # A100 on InfiniBand
    ],
)
def test_the_ring_attention_papers_least_blocks(tflops, gbytes, published, six):
    """Its table 2: the block c, and the least sequence of a rank, 6 c for buffers."""
    tokens = hiding_tokens(tflops * TERA, gbytes * GB)
    assert tokens == pytest.approx(published, rel=0.05)
    assert 6 * tokens == pytest.approx(six, rel=0.01)


@pytest.mark.verifies(f"{PLAN}:hiding_tokens")
def test_fewer_key_heads_need_fewer_tokens_a_mask_twice_as_many():
    plain = hiding_tokens(989 * TERA, 450 * GB)
    assert plain == pytest.approx(989e12 / 450e9)
    assert hiding_tokens(989 * TERA, 450 * GB, queries_per_key=8) == plain / 8
    assert hiding_tokens(989 * TERA, 450 * GB, causal=True) == 2 * plain
    assert hiding_tokens(989 * TERA, 450 * GB, itemsize=4) == 2 * plain
    back = hiding_tokens(989 * TERA, 450 * GB, backward=True)
    assert back == pytest.approx(1.2 * plain)
    narrow = hiding_tokens(989 * TERA, 450 * GB, backward=True, gradient_itemsize=2)
    assert narrow == pytest.approx(0.8 * plain)
    with pytest.raises(ValueError, match="bandwidth=0"):
        hiding_tokens(989 * TERA, 0)


# ------------------------------------------------------------------------- bytes


@pytest.mark.verifies(BYTES)
def test_bytes_by_formula():
    size = {"tokens": 1024, "heads": 32, "key_heads": 32, "head_dim": 128}
    keys = 2 * 1024 * 32 * 128 * 2
    assert context_bytes("ring", **size, ranks=8) == (7 * keys, 7 * keys + 16 * keys)
    assert context_bytes("all_gather", **size, ranks=8) == (7 * keys, 21 * keys)
    assert context_bytes("ulysses", **size, ranks=8) == (7 * keys // 4,) * 2
    for way in ("ring", "all_gather", "ulysses"):
        assert context_bytes(way, **size, ranks=1) == (0, 0)
    grouped = {**size, "key_heads": 4}
    assert context_bytes("ring", **grouped, ranks=8)[0] == 7 * keys // 8
    # Ulysses repeats 4 key heads for 8 ranks: 2 x 32 + 2 x 8 heads in place of 128
    assert context_bytes("ulysses", **grouped, ranks=8)[0] == 7 * keys // 4 * 80 // 128


@pytest.mark.verifies(BYTES)
@pytest.mark.parametrize(
    ("way", "changes", "message"),
    [
        ("star", {}, "way='star' is not one of ring, all_gather, ulysses"),
        ("ulysses", {"ranks": 3}, "heads=4 is not divisible by 3 ranks"),
        ("ring", {"key_heads": 3}, "heads=4 is not a multiple of key_heads=3"),
        ("ring", {"tokens": 0}, "tokens=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(way, changes, message):
    size = {"tokens": 8, "heads": 4, "key_heads": 2, "head_dim": 4, "ranks": 2}
    size |= changes
    with pytest.raises(ValueError, match=message):
        context_bytes(way, **size)


def sent(group, way: str, heads: int, key_heads: int, tokens: int, dtype) -> list[int]:
    """Bytes of this rank, forward without its check, and backward."""
    attention = {
        "ring": ring_attention,
        "all_gather": all_gather_attention,
        "ulysses": ulysses_attention,
    }[way]
    q, k, v = (
        torch.ones(2, h, tokens, 4, dtype=dtype, requires_grad=True)
        for h in (heads, key_heads, key_heads)
    )
    with CommLedger() as forward:
        out = attention(q, k, v, group=group)
    with CommLedger() as backward:
        out.sum().backward()
    return [
        sum(e.nbytes for e in ledger.events if e.kind != "recv" and e.op != "allreduce")
        for ledger in (forward, backward)
    ]


MEASURED = [
    (way, heads, key_heads, 6, dtype)
    for way in ("ring", "all_gather", "ulysses")
    for heads, key_heads, dtype in (
        (12, 12, torch.float32), (12, 2, torch.float32), (12, 4, torch.bfloat16),
        (12, 3, torch.float64),
    )
]  # fmt: skip


def sent_of_all() -> list[list[int]]:
    """Counted by the sockets, which tell what a collective sends."""
    group = dist.new_group(backend="xtrain-socket")
    found = [sent(group, *case) for case in MEASURED]
    dist.destroy_process_group(group)
    return found


@pytest.mark.verifies(BYTES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_sockets_send_is_the_formula(world, xtrain_worlds, ranks):
    if (xtrain_worlds.backend, xtrain_worlds.device) != ("gloo", "cpu"):
        pytest.skip("counts the bytes of a group of sockets")
    found = world(ranks).run(sent_of_all)
    for index, (way, heads, key_heads, tokens, dtype) in enumerate(MEASURED):
        expected = context_bytes(
            way, tokens, heads, key_heads, 4, ranks, batch=2, itemsize=dtype.itemsize
        )
        for by_rank in found:
            assert tuple(by_rank[index]) == expected, MEASURED[index]
