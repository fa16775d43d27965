"""What attention over cut sequences refuses: on every rank, and none hangs."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.context_parallel.attention_cases import qkv
from tests.devices import skip_unless_mistakes_are_told
from xtrain.comm import CommLedger, call_agreement
from xtrain.context_parallel import (
    all_gather_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)

CHECKS = "xtrain.context_parallel.checks"
IDS = torch.zeros(2, 4, dtype=torch.int64)
BALANCED = {
    "ring_attention": ring_attention,
    "all_gather_attention": all_gather_attention,
}
ALL = {**BALANCED, "ulysses_attention": ulysses_attention}

# What is called otherwise, and a word that the error must have.
CALLS = {
    "a window without causal": ({"causal": False, "window": 2}, "window=2"),
    "a window of nothing": ({"window": 0}, "window=0"),
    "half a window": ({"window": 1.5}, "window=1.5"),
    "documents as floats": ({"documents": IDS.double()}, "whole numbers"),
    "documents as booleans": ({"documents": IDS.bool()}, "whole numbers"),
    "documents of another length": ({"documents": IDS[:, :3]}, r"\[2, 4\]"),
    "documents as a list": ({"documents": [0, 0]}, "whole numbers"),
    "an odd length in zigzag": ({"balance": "zigzag", "q": 3}, "pad it to"),
    "an unknown balance": ({"balance": "spiral"}, "spiral"),
    "fewer queries": ({"q": 3, "kv": 4}, "3 local queries and 4 keys"),
    "fewer queries, balanced": (
        {"causal": False, "balance": "zigzag", "q": 2, "kv": 4},
        "2 local queries and 4 keys",
    ),
    "no queries": ({"given": (None, 1, 2)}, "q is NoneType, not a tensor"),
    "a list of keys": ({"given": (0, [1.0], 2)}, "k is list, not a tensor"),
    "too few dims": ({"given": (torch.zeros(4), 1, 2)}, r"q \[4\]"),
    "heads of size 0": (
        {"given": [torch.zeros(2, 6, 4, 0, dtype=torch.float64)] * 3},
        "ZeroDivisionError",
    ),
    "a word for a scale": ({"scale": "large"}, "scale='large' is not a number"),
    "an integer": ({"dtype": torch.int64}, "floating"),
    "nothing": ({"q": 0}, "0 local queries"),
}
# Right by itself, but not what the other rank calls.
DIFFERENT = {
    "another length": ({"q": 2}, "q is"),
    "not causal": ({"causal": False}, "causal is"),
    "another balance": ({"balance": "striped"}, "balance is"),
    "another window": ({"window": 3}, "window is"),
    "another scale": ({"scale": 0.5}, "scale is"),
    "another dtype": ({"dtype": torch.float32}, "q is"),
    "documents": ({"documents": IDS}, "documents is"),
    "no gradients": ({"trained": False}, "trained"),
}


def call(attention, changes: dict) -> torch.Tensor:
    options = {"causal": True, **changes}
    queries, trained = options.pop("q", 4), options.pop("trained", True)
    keys, dtype = options.pop("kv", queries), options.pop("dtype", torch.float64)
    q, k, v, _ = (t.to(dtype) for t in qkv(6, 6, 4))
    q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
    if "given" in options:  # a number is the tensor of that place
        given = options.pop("given")
        q, k, v = ((q, k, v)[g] if isinstance(g, int) else g for g in given)
    elif trained and dtype.is_floating_point:
        q.requires_grad_()
    return attention(q, k, v, **options)


def told(names: dict, cases: dict, wrong_ranks: list[int]) -> list[tuple]:
    """Name, case, error and messages, of each; then a call that is right."""
    found = []
    for name, attention in names.items():
        for case, (changes, _) in cases.items():
            if "balance" in changes and name == "ulysses_attention":
                continue
            mine = changes if dist.get_rank() in wrong_ranks else {}
            error = ""
            with CommLedger() as ledger:
                try:
                    call(attention, mine)
                except ValueError as raised:
                    error = str(raised)
            found.append((name, case, error, ledger.messages))
            assert call(attention, {}).isfinite().all()
    return found


@pytest.mark.parametrize("wrong_ranks", [[0, 1], [1]])
@pytest.mark.verifies(f"{CHECKS}:check_attention", f"{CHECKS}:check_lengths")
@pytest.mark.verifies(f"{CHECKS}:check_hidden", f"{CHECKS}:check_tensors")
@pytest.mark.verifies("xtrain.comm.call_agreement:check_same_call")
def test_a_wrong_call_is_refused_on_every_rank_before_any_message(
    world, xtrain_worlds, wrong_ranks
):
    if wrong_ranks == [1]:
        skip_unless_mistakes_are_told(xtrain_worlds)
    for found in world(2).run(told, ALL, CALLS, wrong_ranks):
        assert len(found) == 3 * len(CALLS) - 3
        for name, case, error, messages in found:
            assert error and messages == 0, (name, case)
            assert name in error, (name, case, error)
            assert re.search(CALLS[case][1], error), (name, case, error)


@pytest.mark.verifies(f"{CHECKS}:check_attention")
@pytest.mark.verifies("xtrain.comm.call_agreement:verdict")
def test_ranks_that_call_differently_are_refused(world, xtrain_worlds):
    skip_unless_mistakes_are_told(xtrain_worlds)
    for found in world(3).run(told, ALL, DIFFERENT, [2]):
        for name, case, error, messages in found:
            assert messages == 0
            assert DIFFERENT[case][1] in error, (name, case, error)


@pytest.mark.verifies("xtrain.comm.call_agreement:check_same_call")
def test_on_a_gpu_a_rank_looks_at_its_own_call_and_says_whose_it_is(monkeypatch):
    gpu = torch.device("meta")  # stands for one
    monkeypatch.setattr(call_agreement, "message_device", lambda group: gpu)
    assert call_agreement.check_same_call("attention", [None], {}, None) is None
    with pytest.raises(ValueError, match="^attention: q is odd$"):
        call_agreement.check_same_call("attention", [None], {}, "q is odd")
    with pytest.raises(ValueError, match="^attention is odd$"):
        call_agreement.check_same_call("attention", [None], {}, "attention is odd")


def heads_of(ranks: int) -> str:
    q, k, v, _ = qkv(ranks + 1, 1, 4)
    try:
        ulysses_attention(q, k, v)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.verifies("xtrain.context_parallel.ulysses:heads_divide")
def test_ulysses_needs_whole_heads(world):
    for told_ in world(3).run(heads_of, 3):
        assert "4 heads on 3 ranks" in told_


def cut_of(length: int | None, balance: str) -> str:
    try:
        whole = torch.zeros(1) if length is None else torch.zeros(1, length)
        shard_sequence(whole, 1, balance)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("length", "balance", "message"),
    [
        (9, "none", "9 cannot be cut into 4 equal parts for balance='none' on 4 ranks"),
        (9, "striped", "pad it to 12"),
        (12, "zigzag", "cut into 8 equal parts for balance='zigzag' on 4 ranks"),
        (12, "zigzag", "pad it to 16"),
        (12, "striped", ""),
        (8, "round", "balance='round' is none of none, striped, zigzag"),
        (None, "none", "dim=1 is not one of"),
    ],
)
@pytest.mark.verifies("xtrain.context_parallel.balance:check_balance")
def test_a_sequence_that_cannot_be_cut_is_refused(world, length, balance, message):
    for said in world(4).run(cut_of, length, balance):
        assert message in said and bool(message) == bool(said)
