"""The decoder on meshes of tensor and data ranks, against the whole one."""

import pytest
import torch
import torch.distributed as dist

from tests.devices import on_cpu, randint, skip_unless_mistakes_are_told
from xtrain.comm import CommLedger, init_mesh
from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import RopeScaling, XtrainConfig, XtrainModel
from xtrain.model.layer import DecoderLayer
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer

MODEL = "xtrain.model.decoder:XtrainModel"
PARTS = (
    MODEL,
    "xtrain.model.parameters:placement_of",
    "xtrain.model.modules:TensorParallelModules",
)
LOSS = "xtrain.model.loss:mean_cross_entropy"


def config_of(**changes) -> XtrainConfig:
    sizes = {
        "vocab_size": 24,
        "hidden_size": 7,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "initializer_range": 0.4,
        "rope_theta": 1000.0,
        "rope_scaling": RopeScaling(factor=5.0, original_max_position_embeddings=120),
    }
    return XtrainConfig(**(sizes | changes))


def batch(seed: int, rows: int = 2, sequence: int = 12):
    """Tokens and labels; more labels are ignored in later rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = randint(24, (2, rows, sequence), generator)
    for row in range(rows):
        labels[row, : 3 * row] = -100
    return tokens, labels


def close(found, expected, what=""):
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )


def check_weights(cut, whole, what) -> None:
    """Every parameter of `cut` is its slice of the whole model's."""
    for name, parameter in cut.named_parameters():
        place = cut.placement(name)
        close(parameter.detach(), place.of(whole.get_parameter(name)), f"{what} {name}")


def tensor_ranks(changes, sequence_parallel: bool) -> None:
    """Logits, loss, all gradients and three AdamW steps."""
    mesh, config = (
        init_mesh((dist.get_world_size(),), ("tensor",)),
        config_of(**changes),
    )
    whole = XtrainModel(config, dtype=torch.float64)
    cut = XtrainModel(
        config, mesh, sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    check_weights(cut, whole, "at the start")
    positions = torch.arange(12) * 3
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.03) for m in (whole, cut)]
    for step in range(3):
        tokens, labels = batch(step)
        logits = whole(tokens, positions=positions)
        close(cut(tokens, positions=positions, gather_logits=True), logits, "logits")
        columns = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        close(cut(tokens, positions=positions), columns, "columns")
        losses = [model.loss(tokens, labels) for model in (whole, cut)]
        close(losses[1], losses[0], "loss")
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        cut.sync_gradients()
        for name, parameter in cut.named_parameters():
            expected = cut.placement(name).of(whole.get_parameter(name).grad)
            assert expected.abs().max() > 1e-9
            close(parameter.grad, expected, f"gradient {name}")
        for optimizer in optimizers:
            optimizer.step()
    check_weights(cut, whole, "after three steps")


@pytest.mark.verifies(*PARTS, LOSS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {}),
        (2, {"tie_word_embeddings": True}),
        (2, {"num_key_value_heads": 1}),
        (3, {"num_key_value_heads": 1}),
        (3, {"num_key_value_heads": 3, "tie_word_embeddings": True}),
        (4, {"num_key_value_heads": 2}),
        (4, {"num_key_value_heads": 12}),
    ],
)
def test_on_tensor_ranks_it_trains_as_one_device(
    world, size, changes, sequence_parallel
):
    world(size).run(tensor_ranks, changes, sequence_parallel)


def data_and_tensor(kind: str, data: int, sequence_parallel: bool) -> None:
    """Unequal numbers of valid labels on the data ranks; AdamW; one big batch."""
    mesh = init_mesh((data, dist.get_world_size() // data), ("data", "tensor"))
    config = config_of(num_key_value_heads=2)
    whole = XtrainModel(config, dtype=torch.float64)
    cut = XtrainModel(
        config, mesh, sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    group, options = mesh["data"].get_group(), {"gradient_reduction": "sum"}
    model: torch.nn.Module = cut
    if kind == "ddp":
        model = DistributedDataParallel(cut, process_group=group, **options)
    if kind == "fsdp":
        model = FullyShardedDataParallel(
            cut, process_group=group, blocks=[DecoderLayer], **options
        )
    right = torch.optim.AdamW(whole.parameters(), lr=0.03)
    if kind.startswith("zero"):
        ours = ZeroOptimizer(
            cut.parameters(),
            torch.optim.AdamW,
            stage=int(kind[-1]),
            process_group=group,
            lr=0.03,
            **options,
        )
    else:
        ours = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(3):
        tokens, labels = batch(step, rows=2 * data)
        here = slice(2 * mesh["data"].get_local_rank(), None)
        here = slice(here.start, here.start + 2)
        losses = [whole.loss(tokens, labels), model(tokens[here], labels[here])]
        close(losses[1], losses[0], "loss")
        for optimizer, loss in zip((right, ours), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        cut.sync_gradients(skip=() if kind == "plain" else ("data",))
        for optimizer in (right, ours):
            optimizer.step()
    with torch.no_grad():
        tokens, labels = batch(9, rows=2 * data)
        mine = 2 * mesh["data"].get_local_rank()
        found = model(tokens[mine : mine + 2], labels[mine : mine + 2])
        close(found, whole.loss(tokens, labels), "after three steps")
    if kind != "fsdp":
        check_weights(cut, whole, "after three steps")


@pytest.mark.verifies(*PARTS, LOSS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ddp", "zero 1", "zero 2", "fsdp"])
def test_with_data_ranks_besides_it_trains_as_one_device(
    world, kind, sequence_parallel
):
    world(4).run(data_and_tensor, kind, 2, sequence_parallel)


@pytest.mark.verifies(LOSS)
@pytest.mark.parametrize("size", [2, 3])
def test_on_data_ranks_alone_the_mean_is_over_all_tokens(world, size):
    world(size).run(data_and_tensor, "plain", size, False)


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
    with pytest.raises(ValueError, match="num_attention_heads: 9 cannot be cut"):
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
