"""Ulysses inside a ring on two axes of a mesh, in float64, against torch."""

from functools import partial

import pytest

from tests.context_parallel.attention_cases import dense, errors, qkv
from tests.context_parallel.test_window_and_documents import documents_of
from tests.devices import skip_unless_mistakes_are_told
from xtrain.comm import init_mesh
from xtrain.context_parallel import (
    hybrid_attention,
    shard_sequence,
    unshard_sequence,
)

CASES = [
    # heads a rank of the ulysses axis, key heads, causal, balance, window, documents
    (1, 1, True, "none", None, None),
    (2, 2, True, "zigzag", None, None),
    (2, 1, True, "striped", 5, None),
    (1, 1, False, "none", None, "packed"),
    (2, 2, True, "zigzag", 7, "different per sequence"),
]


def errors_of(shape, heads, key_heads, causal, balance, window, kind):
    mesh = init_mesh(shape, ("ring", "ulysses"))
    ring, ulysses = (mesh[axis].get_group() for axis in ("ring", "ulysses"))
    length, heads = 4 * shape[0] * shape[1], heads * shape[1]
    q, k, v, grad = qkv(heads, key_heads, length)
    documents = documents_of(kind, 2, length)
    expected = dense(q, k, v, grad, causal, 0.3, window, documents)

    def cut(x, dim=2):
        return shard_sequence(shard_sequence(x, dim, balance, ring), dim, group=ulysses)

    def join(x):
        return unshard_sequence(unshard_sequence(x, 2, group=ulysses), 2, balance, ring)

    attention = partial(
        hybrid_attention, causal=causal, balance=balance, scale=0.3, mesh=mesh,
        window=window, documents=None if documents is None else cut(documents, 1),
    )  # fmt: skip
    return errors(attention, (q, k, v, grad), expected, cut, join)


def all_cases(shape):
    return [errors_of(shape, *case) for case in CASES]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 2), (2, 3), (3, 2)])
@pytest.mark.verifies("xtrain.context_parallel.hybrid:hybrid_attention")
def test_the_hybrid_equals_one_process(world, shape):
    for by_case in world(shape[0] * shape[1]).run(all_cases, shape):
        for case, found in zip(CASES, by_case, strict=True):
            assert all(error < 1e-12 for error in found), (case, found)


def one_rank_wrong(changes: dict) -> list[str]:
    """What each rank is told when one differs, and that a right call follows."""
    mesh = init_mesh((2, 2), ("ring", "ulysses"))
    rank = mesh.get_rank()
    q, k, v, _ = qkv(2, 2, 4)
    told = []
    for wrong, options in changes.items():
        try:
            mine = {"causal": True} | (options if rank == wrong else {})
            hybrid_attention(q, k, v, mesh=mesh, **mine)
            told.append("")
        except ValueError as error:
            told.append(str(error))
    hybrid_attention(q, k, v, mesh=mesh)
    return told


@pytest.mark.verifies("xtrain.context_parallel.hybrid:hybrid_attention")
def test_all_four_ranks_refuse_what_one_calls_otherwise(world, xtrain_worlds):
    skip_unless_mistakes_are_told(xtrain_worlds)
    changes = {0: {"causal": False}, 1: {"window": 0}, 3: {"balance": "spiral"}}
    for told in world(4).run(one_rank_wrong, changes):
        assert "causal" in told[0]
        assert "window=0" in told[1]
        assert "spiral" in told[2]
