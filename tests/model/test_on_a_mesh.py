"""The decoder on meshes of ranks, against the whole one."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.devices import on_cpu, skip_unless_mistakes_are_told
from tests.model.twins import (
    DEEPSEEK,
    LOSSES,
    MIXTRAL,
    PARTS,
    Case,
    batch,
    config_of,
    train_all,
)
from xtrain.comm import CommLedger, init_mesh
from xtrain.model import XtrainModel

MODEL = "xtrain.model.decoder:XtrainModel"
PARTS_OF = (
    MODEL,
    "xtrain.model.parameters:placement_of",
    "xtrain.model.modules:TensorParallelModules",
)
ATTENTION = ("xtrain.tensor_parallel.rotary_attention:RotaryAttention",)
CUT = ("xtrain.model.context:SequenceCut", "xtrain.model.context:sequence_cut")
LOSS = "xtrain.model.loss:mean_cross_entropy"
SUMS = (
    "xtrain.model.decoder_parts:DecoderParts",
    "xtrain.model.decoder_weights:DecoderWeights",
    "xtrain.model.gradient_sums:sum_gradients",
)
MOE = "xtrain.model.moe:make_moe"
TENSOR_MOE = "xtrain.model.moe:TensorMoE"
PLACES = ("xtrain.model.parameters:placement_of", "xtrain.model.mesh_axes:batch_group")
AUXILIARY = "xtrain.model.balance:auxiliary_loss"
BIASES = "xtrain.model.balance:update_biases"
ONE_KEY = {"num_key_value_heads": 1}
ODD = {"padded_vocab_size": 27}
TIED_HEAD = {"tie_word_embeddings": True}
PADDED = {"padded_vocab_size": 28}
TIED = {"num_key_value_heads": 2, "tie_word_embeddings": True}

TENSOR = {
    1: [Case(axes=("tensor",))],
    2: [
        Case(tensor=2, changes={"tie_word_embeddings": True}),
        Case(tensor=2, changes=ONE_KEY),
    ],
    3: [
        Case(tensor=3, changes=ONE_KEY),
        Case(tensor=3, changes=TIED | {"num_key_value_heads": 3}),
    ],
    4: [
        Case(tensor=4, changes={"num_key_value_heads": 2}),
        Case(tensor=4, changes={"num_key_value_heads": 12}),
    ],
}


@pytest.mark.verifies(*PARTS_OF, LOSS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", TENSOR)
def test_on_tensor_ranks_it_trains_as_one_device(world, size, sequence_parallel):
    """Logits, loss, every gradient and three clipped steps; other positions, too."""
    cases = [c._replace(sequence_parallel=sequence_parallel) for c in TENSOR[size]]
    world(size).run(train_all, cases)


CONTEXT = {
    1: [Case(axes=("context",)), Case(axes=("context",), attention="ulysses")],
    2: [
        Case(context=2),
        Case(context=2, balance="striped", changes=TIED),
        Case(context=2, balance="none", changes=ONE_KEY),
        Case(context=2, attention="all_gather", balance="striped", changes=ONE_KEY),
        Case(context=2, attention="ulysses", changes=ONE_KEY),
    ],
    3: [
        Case(context=3, changes=ONE_KEY),
        Case(context=3, balance="striped"),
        Case(context=3, attention="all_gather", changes=TIED),
        Case(context=3, attention="ulysses", balance="none", changes=TIED),
    ],
    4: [
        Case(context=4, changes=TIED),
        Case(context=4, balance="none"),
        Case(context=4, attention="all_gather", balance="none"),
        Case(context=4, attention="ulysses"),
    ],
}


@pytest.mark.verifies(MODEL, LOSS, *CUT, *SUMS)
@pytest.mark.parametrize("size", CONTEXT)
def test_on_context_ranks_it_trains_as_one_device(world, size):
    world(size).run(train_all, CONTEXT[size])


CONTEXT_AND_TENSOR = [
    Case(context=2, tensor=2, changes=ONE_KEY),
    Case(context=2, tensor=2, balance="striped", sequence_parallel=True, changes=TIED),
    Case(context=2, tensor=2, attention="all_gather", sequence_parallel=True),
    Case(
        context=2,
        tensor=2,
        attention="ulysses",
        sequence_parallel=True,
        changes=ONE_KEY,
    ),
    Case(context=2, tensor=2, attention="ulysses"),
]


@pytest.mark.verifies(MODEL, LOSS, *CUT, *SUMS)
def test_with_tensor_ranks_besides_it_trains_as_one_device(world):
    world(4).run(train_all, CONTEXT_AND_TENSOR)


WITH_LOSSES = MIXTRAL | LOSSES
POOLED = WITH_LOSSES | {"router_aux_loss_pooled": True}
TWO_KEYS = WITH_LOSSES | {"num_key_value_heads": 2}

EXPERTS = {
    1: [
        Case(axes=("expert",), changes=WITH_LOSSES),
        Case(axes=("expert",), changes=DEEPSEEK),
    ],
    2: [
        Case(1, 2, changes=POOLED),
        Case(1, 2, padded=True, changes=DEEPSEEK),
        Case(2, 1, changes=MIXTRAL),
        Case(1, 2, padded=True, once_a_rank=True, changes=DEEPSEEK | LOSSES),
    ],
    4: [
        Case(1, 4, changes=MIXTRAL | TIED),
        Case(2, 2, padded=True, changes=WITH_LOSSES),
        Case(2, 2, changes=DEEPSEEK),
        Case(2, 2, once_a_rank=True, changes=MIXTRAL | TIED),
    ],
    8: [Case(1, 8, changes=MIXTRAL), Case(2, 4, changes=DEEPSEEK | LOSSES)],
}


@pytest.mark.verifies(MODEL, MOE, *PLACES, AUXILIARY, BIASES)
@pytest.mark.parametrize("size", EXPERTS)
def test_on_expert_ranks_it_trains_as_one_device(world, size):
    """Loss, every gradient, three clipped steps, and biases moved by all loads."""
    world(size).run(train_all, EXPERTS[size])


OF_OTHER_MODELS = {
    1: [Case(documents=True, axes=("tensor",), changes=PARTS)],
    2: [
        Case(tensor=2, changes=PARTS | PADDED),
        Case(tensor=2, sequence_parallel=True, documents=True, changes=PARTS | ONE_KEY),
        Case(context=2, changes=PARTS),
        Case(context=2, balance="none", documents=True, changes=PARTS),
        Case(context=2, attention="ulysses", documents=True, changes=PARTS | PADDED),
        Case(context=2, attention="all_gather", documents=True, changes=PARTS),
        Case(context=2, balance="documents", documents=True, changes=PARTS),
        Case(context=2, balance="documents"),
    ],
    3: [
        Case(tensor=3, documents=True, changes=PARTS | ONE_KEY | ODD | TIED_HEAD),
        Case(
            tensor=3, sequence_parallel=True, changes=PARTS | {"num_key_value_heads": 3}
        ),
        Case(context=3, balance="striped", documents=True, changes=PARTS),
        Case(
            context=3,
            attention="all_gather",
            balance="documents",
            documents=True,
            changes=TIED,
        ),
    ],
    4: [
        Case(tensor=4, sequence_parallel=True, changes=PARTS | TIED | PADDED),
        Case(context=2, tensor=2, documents=True, changes=PARTS | PADDED),
        Case(
            context=2,
            tensor=2,
            balance="documents",
            sequence_parallel=True,
            documents=True,
            changes=PARTS | ONE_KEY,
        ),
        Case(
            context=2,
            tensor=2,
            attention="ulysses",
            sequence_parallel=True,
            documents=True,
            changes=PARTS | ONE_KEY,
        ),
    ],
    8: [
        Case(
            context=2,
            tensor=4,
            sequence_parallel=True,
            documents=True,
            changes=PARTS | TIED | PADDED,
        ),
        Case(2, 2, tensor=2, changes=MIXTRAL | PARTS),
    ],
}


@pytest.mark.verifies(*PARTS_OF, *CUT, *ATTENTION)
@pytest.mark.parametrize("size", OF_OTHER_MODELS)
def test_with_biases_norms_windows_and_documents_it_trains_as_one_device(world, size):
    """Parts of Qwen2, Qwen3 and Mistral, a padded vocabulary and packed documents."""
    world(size).run(train_all, OF_OTHER_MODELS[size], timeout=180)


EXPERTS_AND_OTHERS = [
    Case(1, 2, tensor=2, changes=TWO_KEYS),
    Case(1, 2, tensor=2, sequence_parallel=True, changes=DEEPSEEK),
    Case(1, 2, tensor=2, once_a_rank=True, changes=TWO_KEYS),
    Case(tensor=4, sequence_parallel=True, padded=True, changes=DEEPSEEK | LOSSES),
    Case(1, 2, context=2, padded=True, changes=WITH_LOSSES),
    Case(context=2, tensor=2, changes=DEEPSEEK),
]


@pytest.mark.verifies(MODEL, MOE, TENSOR_MOE, *PLACES, AUXILIARY, BIASES)
def test_experts_with_tensor_and_context_ranks_it_trains_as_one_device(world):
    world(4).run(train_all, EXPERTS_AND_OTHERS)


@pytest.mark.verifies(MODEL, TENSOR_MOE)
def test_experts_on_all_axes_at_once_it_trains_as_one_device(world):
    world(8).run(
        train_all,
        [
            Case(
                1, 2, context=2, tensor=2, sequence_parallel=True, changes=WITH_LOSSES
            ),
            Case(2, 2, tensor=2, changes=DEEPSEEK),
        ],
    )


# -- what else holds on a mesh


def some_frozen_some_unused() -> tuple[torch.Tensor, torch.Tensor]:
    """A frozen table gets no gradient; a norm without one on rank 1 takes part."""
    mesh = init_mesh((2,), ("data",))
    model = XtrainModel(config_of(), mesh, dtype=torch.float64)
    model.embed_tokens.weight.requires_grad_(False)
    model.loss(*batch(mesh["data"].get_local_rank())).backward()
    here = model.norm.weight.grad.clone()
    if mesh["data"].get_local_rank() == 1:
        model.norm.weight.grad = None
    model.sync_gradients()
    assert model.embed_tokens.weight.grad is None
    return model.norm.weight.grad, here


@pytest.mark.verifies(MODEL)
def test_frozen_parameters_have_no_gradient_and_missing_ones_count_as_zero(world):
    (first, alone), (second, _) = world(2).run(some_frozen_some_unused)
    assert torch.equal(first, alone) and torch.equal(second, alone)


def odd_sequences() -> None:
    mesh = init_mesh((2,), ("tensor",))
    cut = XtrainModel(config_of(), mesh, sequence_parallel=True)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="sequence: 5 is not divisible by 2"):
        cut(tokens)
    if on_cpu():
        with pytest.raises(ValueError, match="outside the vocabulary of 24"):
            cut(tokens[:, :4] + 24)
    with pytest.raises(ValueError, match="num_attention_heads: 9 is not divisible"):
        XtrainModel(config_of(num_attention_heads=9, num_key_value_heads=1), mesh)


@pytest.mark.verifies(MODEL)
def test_what_cannot_be_cut_is_refused_on_all_ranks(world):
    world(2).run(odd_sequences)


def wrong_on_one_data_rank(data: int) -> list[str]:
    """Ids, labels, a shape that only the last data rank brings; then a good batch."""
    mesh = init_mesh((data, dist.get_world_size() // data), ("data", "tensor"))
    model = XtrainModel(config_of(num_key_value_heads=1), mesh)
    last = mesh["data"].get_local_rank() == data - 1
    said = []
    for wrong in ("tokens", "labels", "shape"):
        tokens, labels = batch(mesh["data"].get_local_rank())
        if last and wrong == "tokens":
            tokens[1, 3] = 24
        if last and wrong == "labels":
            labels[0, 0] = -7
        if last and wrong == "shape":
            labels = labels[:, 1:]
        with (
            CommLedger() as ledger,
            pytest.raises(ValueError, match=r"^ranks? \d") as caught,
        ):
            model.loss(tokens, labels)
        sums = [e.payload for e in ledger.events if e.op in ("allreduce", "all_reduce")]
        assert sums == [16], "more was summed than a count and a flag"
        said.append(str(caught.value))
    assert model.loss(*batch(0)).isfinite()
    return said


@pytest.mark.verifies(MODEL, "xtrain.model.loss:count_labels")
@pytest.mark.parametrize(("data", "size"), [(2, 2), (3, 3), (2, 4)])
def test_what_one_data_rank_does_wrong_is_named_on_all_before_activations_move(
    world, xtrain_worlds, data, size
):
    """And no rank waits for the one that raised: the next batch is computed."""
    skip_unless_mistakes_are_told(xtrain_worlds)
    who = "ranks 2, 3" if size > data else f"rank {data - 1}"
    for said in world(size).run(wrong_on_one_data_rank, data):
        assert said[0] == f"{who}: ids [24] are outside the vocabulary of 24"
        assert said[1] == f"{who}: ids [-7] are outside the vocabulary of 24"
        assert said[2].startswith(f"{who}: labels of shape [2, 11]")


def from_the_meta_device() -> None:
    mesh = init_mesh((2,), ("tensor",))
    config = config_of(tie_word_embeddings=True)
    once = XtrainModel(config, mesh)
    later = XtrainModel(config, mesh, device="meta")
    assert all(p.is_meta for p in later.parameters())
    later.to_empty(device=torch.get_default_device())
    later.reset_parameters()
    assert later.lm_head.weight is later.embed_tokens.weight
    for name, parameter in later.named_parameters():
        assert torch.equal(parameter, once.get_parameter(name))


@pytest.mark.verifies(MODEL)
def test_a_cut_model_from_the_meta_device_is_the_same(world):
    world(2).run(from_the_meta_device)


DROPS = PARTS | {"num_key_value_heads": 1, "attention_dropout": 0.3}


def drops_as_one_device(sizes, **options) -> float:
    """Three steps with equal generators; how far dropout moves the logits."""
    config = config_of(**DROPS)
    mesh = init_mesh(sizes, ("context", "tensor"))
    whole = XtrainModel(config, dtype=torch.float64)
    cut = XtrainModel(config, mesh, dtype=torch.float64, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.03) for m in (whole, cut)]
    documents = torch.arange(12).expand(2, 12) // 5
    for step in range(3):
        losses = []
        for model, optimizer in zip((whole, cut), optimizers, strict=True):
            torch.manual_seed(step)
            losses.append(model(*batch(step), documents=documents))
            optimizer.zero_grad()
            losses[-1].backward()
            model.sync_gradients()
            optimizer.step()
        torch.testing.assert_close(*losses)
        for name, parameter in cut.named_parameters():
            gradient = cut.placement(name).of(whole.get_parameter(name).grad)
            torch.testing.assert_close(parameter.grad, gradient, msg=name)
    tokens, _ = batch(0)
    dropped = whole(tokens)
    assert torch.equal(whole.eval()(tokens), whole(tokens)), "eval drops nothing"
    return (dropped - whole(tokens)).abs().max().item()


@pytest.mark.verifies(
    MODEL,
    "xtrain.model.modules:TensorParallelModules",
    "xtrain.tensor_parallel.attention_dropout:DropoutAttention",
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_dropout_on_tensor_ranks_is_that_of_one_device(world, size):
    for cut_sequence in (False, True):
        given = partial(drops_as_one_device, sequence_parallel=cut_sequence)
        for moved in world(size).run(given, (1, size)):
            assert moved > 0.01


@pytest.mark.verifies(
    *CUT,
    "xtrain.model.context_dropout:ContextDropout",
    "xtrain.model.context_dropout:Places",
    "xtrain.context_parallel.sequence_mask:DroppingMask",
)
@pytest.mark.parametrize(
    ("sizes", "attention", "balance", "recompute"),
    [
        ((1, 1), "ring", None, "none"),
        ((2, 1), "ring", "striped", "none"),
        ((2, 1), "all_gather", "documents", "layer"),
        ((3, 1), "ring", "zigzag", "selective"),
        ((3, 1), "ulysses", None, "none"),
        ((2, 2), "ring", "documents", "none"),
        ((2, 2), "ulysses", None, "selective"),
        ((4, 1), "all_gather", "none", "none"),
    ],
)
def test_attention_dropout_over_context_ranks_is_that_of_one_device(
    world, sizes, attention, balance, recompute
):
    """With a window in one layer, documents in both, and recomputation."""
    given = partial(
        drops_as_one_device,
        context_attention=attention,
        context_balance=balance,
        recompute=recompute,
    )
    for moved in world(math.prod(sizes)).run(given, sizes):
        assert moved > 0.01
