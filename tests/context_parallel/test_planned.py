"""A mask made once a batch: the same numbers, planned once, refused where it is not
that of the call."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.context_parallel.attention_cases import attend, qkv
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger
from xtrain.context_parallel import deal_documents, sequence_mask, shard_sequence
from xtrain.context_parallel.mask import Visible

PLANNED = "xtrain.context_parallel.planned:sequence_mask"
LAYOUTS = [("ring", "zigzag"), ("ring", "dealt"), ("all_gather", "striped"),
           ("ulysses", "none")]  # fmt: skip
LOCAL = 8


def batch(balance: str):
    """This rank's q, k, v and gradient, its documents, and the deal if that is it."""
    size = dist.get_world_size()
    whole = qkv(2 * size, 2, LOCAL * size)
    ids = (torch.arange(LOCAL * size) // 5).expand(2, -1)
    balance = deal_documents(ids, size) if balance == "dealt" else balance
    parts = [shard_sequence(t, 2, balance) for t in whole]
    return parts, shard_sequence(ids, 1, balance), balance


def layers(name: str, balance, hidden: dict) -> tuple[list[torch.Tensor], int, int]:
    """Two layers forward and backward: what they give, how often strips were sought,
    and the collectives besides those of each call's check."""
    strips, (parts, _, balance) = Visible.strips, batch(balance)
    sought = []

    def counted(visible):
        sought.append(visible)
        return strips(visible)

    q, k, v = (t.clone().requires_grad_() for t in parts[:3])
    with replaced(Visible, "strips", counted), CommLedger() as ledger:
        out = attend(name, q, k, v, True, balance, **hidden)
        attend(name, out, k, v, True, balance, **hidden).backward(parts[3])
    calls = [e.op for e in ledger.events if e.kind == "collective"]
    gathered = sum("gather" in op for op in calls)
    return [out.detach(), q.grad, k.grad, v.grad], len(sought), gathered


def both_ways() -> list[tuple]:
    found = []
    for name, kind in LAYOUTS:
        _, documents, balance = batch(kind)
        anew = layers(name, kind, {"window": 7, "documents": documents})
        mask = sequence_mask(LOCAL, True, balance, 7, documents)
        once = layers(name, kind, {"mask": mask})
        again = layers(name, kind, {"mask": mask})
        same = all(torch.equal(a, b) for a, b in zip(anew[0], once[0], strict=True))
        found.append((same, anew[1:], once[1:], again[1:]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.verifies(PLANNED, "xtrain.context_parallel.planned:mask_of_call")
@pytest.mark.verifies("xtrain.context_parallel.sequence_mask:SequenceMask")
def test_a_mask_made_once_serves_all_layers_with_equal_bits(world, ranks):
    for found in world(ranks).run(both_ways):
        for same, anew, once, again in found:
            assert same
            assert anew[0] == 2 * once[0] > 0 == again[0]
            assert anew[1] - 2 == once[1] == again[1]


def told(cases: dict) -> list[str]:
    size, (parts, documents, _) = dist.get_world_size(), batch("zigzag")
    mask, errors = sequence_mask(LOCAL, True, "zigzag", 7, documents), []
    made = {"balance": "zigzag", "mask": mask, "causal": True, "name": "ring"}
    for changes, _ in cases.values():
        options = {**made, **changes}
        keep = options.pop("keep", slice(None))
        with CommLedger() as ledger:
            try:
                attend(q=parts[0][keep], k=parts[1][keep], v=parts[2][keep], **options)
                errors.append("")
            except ValueError as error:
                errors.append(str(error))
        assert ledger.messages == 0
    attend("ring", *parts[:3], balance="zigzag", mask=mask)
    for wrong in ({"tokens": 7, "balance": "zigzag"}, {"tokens": 4, "window": 0}):
        with pytest.raises(ValueError, match="pad it|window=0"):
            sequence_mask(**wrong)
    if size > 1:
        with pytest.raises(ValueError, match="window is"):
            sequence_mask(4, window=2 + dist.get_rank())
    return errors


@pytest.mark.verifies(PLANNED, "xtrain.context_parallel.checks:check_mask")
def test_a_mask_of_another_call_is_refused_on_every_rank(world):
    cases = {
        "another balance": ({"balance": "striped"}, "striped"),
        "not causal": ({"causal": False}, "False"),
        "half the batch": ({"keep": slice(0, 1)}, r"2, 8.*1, 8"),
        "a window besides": ({"window": 3}, "give them or the mask"),
        "no mask": ({"mask": 3}, "mask is int"),
        "in Ulysses": ({"name": "ulysses"}, "zigzag"),
    }
    for errors in world(2).run(told, cases):
        for (case, (_, words)), error in zip(cases.items(), errors, strict=True):
            assert re.search(words, error), (case, error)
