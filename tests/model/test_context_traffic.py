"""What a model on context ranks sends: each layer its attention, and all gradients."""

import sys
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.collective_choice import RING
from xtrain.context_parallel import SequenceMask, all_gather_attention, ulysses
from xtrain.model import XtrainConfig, XtrainModel, gradient_sums
from xtrain.model.context import ATTENTIONS
from xtrain.plan import context_bytes

BATCH, LENGTH, HEADS, HEAD_DIM, HIDDEN = 3, 24, 12, 2, 7
MODEL = (
    "xtrain.model.layer:DecoderLayer",
    "xtrain.model.context:SequenceCut",
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
)


@contextmanager
def rings():
    """Collectives as our rings, which let the ledger count what they send."""
    with ExitStack() as stack:
        attention = sys.modules[all_gather_attention.__module__]
        for module in (attention, ulysses, gradient_sums):
            stack.enter_context(replaced(module, "TORCH", RING))
        yield


def sent(call) -> int:
    """In messages; backends of ours count their collectives besides."""
    with CommLedger() as ledger:
        call()
    return sum(event.nbytes for event in ledger.events if event.kind == "send")


def traffic(attention: str, key_heads: int) -> list[int]:
    """Bytes of a layer forward and backward, around it, and for all gradients."""
    config = XtrainConfig(
        vocab_size=24, hidden_size=HIDDEN, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=key_heads, head_dim=HEAD_DIM,
    )  # fmt: skip
    mesh = init_mesh((dist.get_world_size(),), ("context",))
    model = XtrainModel(config, mesh, context_attention=attention, dtype=torch.float64)
    local = LENGTH // dist.get_world_size()
    torch.manual_seed(0)  # ranks of a context group bring the same tokens
    tokens = torch.randint(24, (BATCH, LENGTH))
    x = torch.randn(BATCH, local, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = []

    def ends():
        embedded = model.embed_tokens(model.context.shard(tokens))
        model.lm_head(model.norm(embedded)).sum().backward()

    with rings():
        return [
            sent(lambda: out.append(model.layers[0](x, torch.arange(local)))),
            sent(lambda: out[0].sum().backward()),
            sent(ends),
            sent(model.sync_gradients),
            sum(p.numel() for p in model.parameters()),
        ]


@pytest.mark.verifies(*MODEL)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_layer_sends_the_formulas_bytes_and_all_else_only_gradients(world, ranks):
    for attention in ATTENTIONS:
        for key_heads in (HEADS, 1):
            expected = context_bytes(
                attention, LENGTH // ranks, HEADS, key_heads, HEAD_DIM, ranks,
                batch=BATCH, itemsize=8,
            )  # fmt: skip
            found = world(ranks).run(traffic, attention, key_heads)
            for *layer, ends, _, _ in found:
                assert (*layer, ends) == (*expected, 0)
            parameters = found[0][-1]
            gradients = sum(one[-2] for one in found)
            assert gradients == 2 * (ranks - 1) * parameters * 8


def planned(layers: int, attention: str, recompute: str) -> list[Any]:
    """Windows of masks made in a step of packed documents, and what more is sent."""
    config = XtrainConfig(
        vocab_size=24, hidden_size=HIDDEN, intermediate_size=12,
        num_hidden_layers=layers, num_attention_heads=HEADS, head_dim=HEAD_DIM,
        num_key_value_heads=HEADS, sliding_window=5, max_window_layers=1,
    )  # fmt: skip
    model = XtrainModel(
        config, init_mesh((2,), ("context",)), context_attention=attention,
        recompute=recompute,
    )  # fmt: skip
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 24
    made: list[int | None] = []

    def plan(mask, *ranks):
        made.append(mask.window)
        return right(mask, *ranks)

    right = SequenceMask.plan
    with replaced(SequenceMask, "plan", plan):
        model(tokens, tokens, documents=tokens // 7).backward()
    calls = []
    for documents in (None, torch.zeros_like(tokens)):
        with CommLedger() as ledger:
            model(tokens, tokens, documents=documents).backward()
        calls.append(len(ledger.events))
    return [sorted(made, key=str), calls[1] - calls[0]]


@pytest.mark.verifies("xtrain.context_parallel.sequence_mask:SequenceMask")
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_masks_are_planned_once_a_batch_for_all_layers_and_passes(world, recompute):
    for attention in ATTENTIONS:
        few, many = (
            world(2).run(planned, layers, attention, recompute) for layers in (2, 6)
        )
        assert few == many
        pairs = 1 if attention == "ulysses" else 2  # of ranks, of which one is mine
        for made, more in many:
            assert made == [5] * pairs + [None] * pairs
            assert more == 0
