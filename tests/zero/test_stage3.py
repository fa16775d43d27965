"""Stage 3: equal to one process, little in full at any time, three passes sent."""

import copy
import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.devices import same_numbers
from tests.training import (
    Model,
    batch_of,
    flat_groups,
    largest_difference,
    loss_of,
    make_model,
    pieces_of,
    reference,
    storages,
)
from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import RING, collectives_named
from xtrain.model.layer import DecoderLayer
from xtrain.plan import state_memory
from xtrain.zero import AdamW, FullyShardedDataParallel

UNIT = "xtrain.zero.fsdp_unit:FSDPUnit"
FSDP = "xtrain.zero.fsdp:FullyShardedDataParallel"
BLOCKS = "xtrain.zero.fsdp_wrap:find_blocks"
STEPS = 20


def wrap(seed, frozen=False, dtype=torch.float64, choice="torch", **options):
    bare = make_model(seed, frozen, dtype)
    collectives = collectives_named(choice)
    return FullyShardedDataParallel(bare, collectives=collectives, **options)


def train(reduction, micro_batches, frozen, choice, reshard, blocks, max_norm):
    rank = dist.get_rank()
    model = wrap(
        100 + rank if rank else 0,
        frozen,
        choice=choice,
        reshard_after_forward=reshard,
        blocks=blocks,
        gradient_reduction=reduction,
    )
    make = AdamW if choice == "ring" else torch.optim.AdamW
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trainable, lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss_of(model, batch_of(step, micro, rank)).backward()
        if step == 2:  # what these gather is not used for training
            with torch.no_grad():
                loss_of(model, batch_of(step, 0, rank))
        if step == 3:  # a forward whose backward never comes
            loss_of(model, batch_of(step, 0, rank))
        if max_norm:
            model.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.verifies("xtrain.zero.flat_param_group:Unshard", UNIT, FSDP)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_twenty_steps_equal_one_process(world, size):
    cases = [
        ("average", 1, False, "torch", True, None, None),
        ("average", 2, True, "torch", False, None, 3.0),
        ("sum", 1, True, "ring", False, [DecoderLayer, "embed_tokens"], None),
        ("sum", 2, False, "ring", True, ["layers.0", "layers.2", "norm"], 3.0),
        ("average", 1, True, "direct", True, None, None),
    ]
    for case in {4: cases[1:3] + cases[4:], 8: cases[1:2]}.get(size, cases):
        reduction, micro_batches, frozen, *_, max_norm = case
        expected = reference(
            size, STEPS, micro_batches, reduction == "average", frozen, max_norm
        )
        for result in world(size).run(train, *case):
            assert largest_difference(result, expected) < 1e-12, case


def one_step(make, forward, dtype=torch.float32, **options):
    """Compare the gradients of a sharded model with the bare one's."""
    torch.manual_seed(0)
    bare = make().to(dtype)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(make().to(dtype), **options)
    forward(bare).backward()
    forward(model).backward()
    groups = flat_groups(model)
    assert not any(group.is_full for group in groups)
    assert not any(group.full.untyped_storage().nbytes() for group in groups)
    # every rank has the same data: the average is each one's gradient
    compare_gradients(model, bare)


def compare_gradients(model, bare):
    """This rank's pieces against those of the bare module's whole gradients."""
    named = bare if isinstance(bare, dict) else dict(bare.named_parameters())
    for name, piece, bounds in pieces_of(model):
        whole = named[name].grad
        if whole is None:
            zero = piece.requires_grad and piece.grad is not None
            assert not piece.grad.any() if zero else piece.grad is None, name
        else:
            whole = whole.flatten()[bounds]
            torch.testing.assert_close(piece.grad, whole, msg=name)


class Checkpointed(Model):
    """Each layer is computed again in backward; the last one together with the norm."""

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        hidden = self.embed_tokens(tokens)
        for layer in self.layers[:-1]:
            hidden = checkpoint(layer, hidden, positions, use_reentrant=False)

        def last(hidden):
            return self.lm_head(self.norm(self.layers[-1](hidden, positions)))

        return checkpoint(last, hidden, use_reentrant=False) * self.scale


class Segments(Model):
    """All layers in one segment: the segment gathers them before any has its turn."""

    def forward(self, tokens):
        def run(hidden):
            for layer in self.layers:
                hidden = layer(hidden, positions)
            return hidden

        positions = torch.arange(tokens.shape[1])
        hidden = checkpoint(run, self.embed_tokens(tokens), use_reentrant=False)
        return self.lm_head(self.norm(hidden)) * self.scale


def fixed_loss(model):
    return loss_of(model, batch_of(0, 0, 0))


def twice(model):
    """Two forwards, then one backward, with an evaluation between."""
    first = model(batch_of(0, 0, 0))
    with torch.no_grad():
        model(batch_of(0, 1, 0))
    return first.square().sum() + model(batch_of(0, 2, 0)).square().sum()


def eval_between(model):
    loss = loss_of(model, batch_of(0, 0, 0))
    with torch.no_grad():
        model(batch_of(0, 1, 0))
    return loss


class Shared(nn.Module):
    """One block called three times, twice of them side by side."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        layer, x = self.layers[0], self.last(x)  # so that backward needs its weights
        return self.last(layer(torch.tanh(x)) + layer(torch.sin(x)) * layer(x))


def shared_loss(model):
    return model(torch.arange(6.0).view(2, 3)).square().sum()


class FrozenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        for layer in self.layers[:2]:
            layer.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Wrapped(nn.Module):
    """Blocks that give dictionaries and dataclasses."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, given):
            value = given.value if isinstance(given, Output) else given["x"]
            value = torch.tanh(self.linear(value))
            return {"x": value} if isinstance(given, Output) else Output(value)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Part() for _ in range(3)])

    def forward(self, x):
        given = {"x": x}
        for layer in self.layers:
            given = layer(given)
        return given.value


class TwoTypes(nn.Module):
    """A block with weights of two dtypes: two flat shards."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(2)])
        self.layers[1].register_parameter("gain", nn.Parameter(torch.ones(3)))
        self.layers[1].forward = self.scaled

    def to(self, dtype):
        return self

    def scaled(self, x):
        layer = self.layers[1]
        return nn.functional.linear(x, layer.weight, layer.bias) * layer.gain

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x.double())))


def odd_models():
    one_step(Checkpointed, fixed_loss)
    one_step(Checkpointed, fixed_loss, reshard_after_forward=False)
    one_step(Segments, fixed_loss)
    one_step(Model, twice)
    one_step(Model, eval_between)
    one_step(Model, twice, reshard_after_forward=False)
    one_step(Shared, shared_loss)
    one_step(Shared, shared_loss, collectives=RING)
    one_step(FrozenBlock, shared_loss)
    one_step(Wrapped, shared_loss)
    one_step(TwoTypes, shared_loss)


@pytest.mark.verifies(UNIT, FSDP)
def test_models_that_break_naive_sharding(world):
    world(2).run(odd_models)


def measure(compute_dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wrap(rank, dtype=torch.float32, compute_dtype=compute_dtype)
    optimizer = AdamW(model.parameters(), lr=0.01)
    loss_of(model, batch_of(0, 0, rank)).backward()
    grads = storages([p.grad for p in model.parameters()])
    optimizer.step()
    weights = storages(model.parameters())
    fulls = storages(s.full for s in flat_groups(model))
    assert fulls == 0
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    parameters = [s.layout.numel for s in flat_groups(model)]
    return weights, grads, sum(t.nbytes for t in state), parameters, size


@pytest.mark.verifies(UNIT, FSDP)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_bytes_per_rank_equal_the_formula(world, size):
    """Each block is padded by itself; state of padding is never made."""
    moments = 0
    for dtype in (None, torch.bfloat16):
        results = world(size).run(measure, dtype)
        for weights, grads, state, blocks, ranks in results:
            expected = [state_memory(n, ranks, 3, "fp32") for n in blocks]
            assert weights == sum(memory.weights for memory in expected)
            assert grads == sum(memory.gradients for memory in expected)
            assert state <= sum(memory.optimizer for memory in expected)
            moments += state
        assert moments == 8 * sum(results[0][3])
        moments = 0


def traffic(reshard, compute_dtype, micro_batches):
    rank = dist.get_rank()
    model = wrap(
        rank,
        dtype=torch.float32,
        choice="ring",
        reshard_after_forward=reshard,
        compute_dtype=compute_dtype,
    )
    padded = [sum(s.layout.padded_numel for s in u.flat_groups) for u in model.units]
    sent = []
    for _ in range(2):  # without and with prefetch
        with CommLedger() as ledger:
            for micro in range(micro_batches):
                loss_of(model, batch_of(0, micro, rank)).backward()
        sent.append(ledger.bytes_sent)
        assert ledger.bytes_sent == ledger.bytes_received
    return sent, padded[0], sum(padded[1:])


@pytest.mark.verifies(UNIT, FSDP)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_payload_is_three_passes_or_two(world, size):
    """The root unit stays between forward and backward: two passes of it always."""
    for reshard, dtype, micro_batches in (
        (True, None, 1),
        (False, None, 1),
        (True, torch.bfloat16, 2),
    ):
        width = 4 if dtype is None else 2
        passes = 3 if reshard else 2
        for sent, root, blocks in world(size).run(
            traffic, reshard, dtype, micro_batches
        ):
            elements = micro_batches * (2 * root + passes * blocks)
            assert [s * size for s in sent] == [(size - 1) * width * elements] * 2


def collectives_of_a_step():
    """All that torch's dispatcher sees of each of two steps, in order."""
    rank = dist.get_rank()
    model = wrap(rank, dtype=torch.float32)
    steps = []
    for _ in range(2):
        with CommLedger() as ledger:
            loss_of(model, batch_of(0, 0, rank)).backward()
        steps.append([event.op.replace("_", "") for event in ledger.events])
    return steps


@pytest.mark.verifies(BLOCKS, UNIT, FSDP)
def test_gather_gather_reduce_and_nothing_else(world):
    """Prefetch changes when blocks are gathered, not how often. No rank scatters."""
    for steps in world(2).run(collectives_of_a_step):
        for calls in steps:
            gathers = sum("allgather" in op for op in calls)
            scatters = sum("reducescatter" in op for op in calls)
            assert (gathers, scatters) == (1 + 3 + 3, 4), calls
            assert len(calls) == gathers + scatters, calls


def full_blocks(reshard, layers):
    """The most blocks that had their weights in memory at any time, root aside."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
    )
    module.forward = lambda x: chain(module, x)
    model = FullyShardedDataParallel(module, reshard_after_forward=reshard)
    peaks = {"forward": 0, "backward": 0, "after": 0, "eval": 0}
    phase = "forward"
    gradients = [0, 0]

    def look(*_):
        units = model.units[1:]
        full = [s.full.untyped_storage().nbytes() for u in units for s in u.flat_groups]
        assert len(full) == layers
        peaks[phase] = max(peaks[phase], sum(n > 0 for n in full))
        gradients[0] = max(gradients[0], len(model._schedule.reducer._in_flight))

    for layer in module[1]:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    prefetched = []
    for _ in range(3):
        phase = "forward"
        loss = model(torch.randn(2, 8)).sum()
        look()
        prefetched.append(peaks["forward"])
        phase = "backward"
        loss.backward()
        phase = "after"
        look()
    phase = "eval"
    with torch.no_grad():
        model(torch.randn(2, 8))
    return peaks, gradients[0], prefetched[0]


def chain(module, x):
    x = module[0](x)
    for layer in module[1]:
        x = torch.tanh(layer(x))
    return x


@pytest.mark.verifies(BLOCKS, FSDP)
def test_at_most_two_blocks_are_full(world):
    for peaks, reducing, first in world(2).run(full_blocks, True, 6):
        assert peaks == {"forward": 2, "backward": 2, "after": 0, "eval": 2}
        assert reducing <= 1
        assert first == 1  # the first forward does not know what follows
    for peaks, _, _ in world(2).run(full_blocks, False, 6):
        assert (peaks["forward"], peaks["after"], peaks["eval"]) == (6, 0, 2)


def names_and_pieces():
    rank, size = dist.get_rank(), dist.get_world_size()
    bare = make_model(0, frozen=True)
    model = wrap(rank, frozen=True)
    expected = dict(bare.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    assert [p.requires_grad for p in found.values()] == [
        p.requires_grad for p in expected.values()
    ]
    assert all(p.dim() == 1 for p in found.values())
    counts = {name: p.numel() for name, p in found.items()}
    shards = flat_groups(model)
    for shard in shards:  # each piece is a view of its block's flat shard
        base = shard.shard.untyped_storage().data_ptr()
        assert all(
            found[name].untyped_storage().data_ptr() == base or not found[name].numel()
            for name in shard.names
        )
    kinds = {(u.module, s.trainable) for u in model.units for s in u.flat_groups}
    assert len(kinds) == len(shards) == 5  # one block has frozen ones too
    return counts, {n: p.numel() for n, p in expected.items()}, size


@pytest.mark.verifies(UNIT, FSDP)
def test_names_are_the_bare_modules_and_pieces_add_up(world):
    for size in (1, 3):
        results = world(size).run(names_and_pieces)
        whole = results[0][1]
        for name, count in whole.items():
            assert sum(counts[name] for counts, *_ in results) == count


def full_state(reshard):
    rank = dist.get_rank()
    model = wrap(7 + rank, reshard_after_forward=reshard)
    state = model.full_state_dict()
    expected = make_model(7).state_dict()
    assert largest_difference(state, dict(expected)) == 0
    assert "lm_head.weight" in state
    fresh = make_model(1)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.lm_head.weight, expected["embed_tokens.weight"])
    return [tuple(t.shape) for t in state.values()]


@pytest.mark.verifies(UNIT, FSDP)
def test_full_state_dict_is_the_bare_modules(world):
    world(3).run(full_state, True)


def sixteen_bit_compute():
    rank = dist.get_rank()
    model = wrap(rank, dtype=torch.float32, compute_dtype=torch.bfloat16)
    seen = []
    model.module.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, out: seen.extend([module.weight.dtype, out.dtype])
    )
    loss_of(model, batch_of(0, 0, 0)).backward()  # the same data on all ranks
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    bare = make_model(0, dtype=torch.float32)
    for parameter in bare.parameters():
        parameter.data = parameter.data.bfloat16()
    loss_of(bare, batch_of(0, 0, 0)).backward()
    named = dict(bare.named_parameters())
    for name, piece, bounds in pieces_of(model):
        assert piece.grad.dtype == torch.float32
        # Twice a bf16 number and half of that: two ranks' sum is exact.
        whole = named[name].grad.float().flatten()
        assert same_numbers(piece.grad, whole[bounds], torch.bfloat16), name


@pytest.mark.verifies(UNIT, FSDP)
def test_compute_dtype(world):
    world(2).run(sixteen_bit_compute)


class Sees(nn.Module):
    """Notes the dtypes that come in."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.linear = nn.Linear(3, 3)

    def forward(self, x, options):
        self.seen += [x.dtype, options["mask"].dtype, options["index"].dtype]
        return self.linear(x * options["mask"]).sum()


def what_comes_in(compute_dtype):
    model = FullyShardedDataParallel(Sees(), compute_dtype=compute_dtype)
    given = {"mask": torch.ones(3), "index": torch.arange(3)}
    model(torch.ones(2, 3), given).backward()
    return model.module.seen


@pytest.mark.verifies(FSDP)
def test_floating_point_inputs_are_cast(world):
    low, whole = torch.bfloat16, torch.float32
    assert world(2).run(what_comes_in, low) == [[low, low, torch.int64]] * 2
    assert world(2).run(what_comes_in, None) == [[whole, whole, torch.int64]] * 2


class Half(nn.Module):
    """A block of which a step uses one part; on request it fails."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(2, 1)
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise KeyError("on purpose")
        return self.used(x)


def halves():
    return nn.Sequential(nn.Linear(3, 3), nn.ModuleList([Half(), Half()]))


def run_halves(model, x):
    x = model[0](x)
    for part in model[1]:
        x = part(x)
    return x.sum()


def unused_in_a_block():
    """Memory that is not filled holds NaN: gradients of what took no part are zero."""
    torch.use_deterministic_algorithms(True)
    module = halves()
    module.forward = lambda x: run_halves(module, x)
    model = FullyShardedDataParallel(module)
    model(torch.ones(2, 3)).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert not any(grads[name].any() for name in grads if "unused" in name)
    shards = flat_groups(model)
    assert all(s.layout.numel < s.layout.padded_numel for s in shards[1:])  # padded
    return sum(bool(grad.any()) for grad in grads.values())


@pytest.mark.verifies(FSDP)
def test_what_took_no_part_has_a_gradient_of_zero(world):
    assert min(world(2).run(unused_in_a_block)) > 0


def attributes(model):
    """Which modules still have something in front of their parameters."""
    return [
        f"{prefix}.{name}"
        for prefix, module in model.module.named_modules()
        for name in module._parameters
        if name in module.__dict__ or getattr(module, name).dim() != 1
    ]


def after_a_block_failed():
    """A forward that raises inside a block, which a caller catches and goes on."""
    module = halves()
    module.forward = lambda x: run_halves(module, x)
    model = FullyShardedDataParallel(module)
    x = torch.ones(2, 3)
    left = []
    model(x).backward()
    left.append(attributes(model))
    with torch.no_grad():
        model(x)
    left.append(attributes(model))
    module[1][1].fails = True
    with pytest.raises(KeyError):
        model(x)
    left.append(attributes(model))
    full = [
        s.full.untyped_storage().nbytes()
        for u in model.units[1:]
        for s in u.flat_groups
    ]
    module[1][1].fails = False
    model.zero_grad()
    model(x).backward()
    left.append(attributes(model))
    return left, full


@pytest.mark.verifies(FSDP)
def test_parameters_are_back_after_a_step_and_after_a_failure(world):
    for left, full in world(2).run(after_a_block_failed):
        assert left == [[], [], [], []]
        assert full == [0, 0]


class Reentrant(nn.Module):
    """Reentrant checkpoints compute blocks in backward, or a part of the root."""

    def __init__(self, blocks):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.recomputed = self.layers if blocks else [self.first, self.first]

    def forward(self, x):
        x = self.first(x)
        for module in self.recomputed:
            x = checkpoint(module, x, use_reentrant=True)
        return x


class HalfComputedAgain(nn.Module):
    """A block that computes some of itself again in backward, as transformers does."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.out, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x):
        again = partial(checkpoint, use_reentrant=self.reentrant)
        x = x + self.out(again(self.inner, x))
        return again(lambda x: x + again(self.inner[0], x)[:, :4], x)


class Blocks(nn.Module):
    """Such blocks, all but the first of them computed again as a whole, too."""

    def __init__(self, reentrant, outer):
        super().__init__()
        self.first, self.outer = nn.Linear(3, 4), outer
        self.layers = nn.ModuleList([HalfComputedAgain(reentrant) for _ in range(3)])

    def forward(self, x):
        x = self.layers[0](self.first(x))
        for layer in self.layers[1:]:
            if self.outer is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.outer)
        return x


def recomputed(make, options, micro_batches):
    """Gradients of micro-batches, all but one in `no_sync`, against the bare ones'."""
    torch.manual_seed(0)
    bare = make().double()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = FullyShardedDataParallel(copy.deepcopy(bare), **options)
    data = torch.randn(size, micro_batches, 5, 3, dtype=torch.float64)
    for number in range(micro_batches):
        last = number == micro_batches - 1
        with nullcontext() if last else model.no_sync():
            model(data[rank, number]).square().sum().backward()
        for of_rank in data:
            (bare(of_rank[number]).square().sum() / size).backward()
    assert not any(unit.flat_groups[0].is_full for unit in model.units)
    compare_gradients(model, bare)


def all_recomputed():
    for blocks in (True, False):
        recomputed(partial(Reentrant, blocks), {}, 1)
    for reentrant in (True, False):
        for outer in (True, False, None):
            for reshard in (True, False):
                make = partial(Blocks, reentrant, outer)
                options = {"reshard_after_forward": reshard}
                recomputed(make, options, 1 + 2 * (reshard is (outer is None)))


@pytest.mark.verifies("xtrain.zero.fsdp_schedule:UnitSchedule")
def test_blocks_and_parts_of_them_are_computed_again_in_backward(world):
    """Reentrant or not, one in another, in any number of micro-batches."""
    world(2).run(all_recomputed)


def of_transformers():
    """Three AdamW steps of both models of `transformers`, all data on every rank."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(hidden_size=8, intermediate_size=12, **small)
    gpt2 = transformers.GPT2Config(
        n_embd=8, vocab_size=24, n_layer=2, n_head=2, attn_pdrop=0, resid_pdrop=0,
        embd_pdrop=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    kinds = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel
    for kind, config in zip(kinds, (llama, gpt2), strict=True):
        for reentrant in (True, False):
            torch.manual_seed(0)
            bare = kind(config).double().train()
            copied = copy.deepcopy(bare)
            options = {"use_reentrant": reentrant}
            copied.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model = FullyShardedDataParallel(copied)
            steps = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, bare)]
            for step in range(3):
                tokens = batch_of(0, step, 0) % 24
                for module, optimizer in zip((model, bare), steps, strict=True):
                    optimizer.zero_grad()
                    module(input_ids=tokens, labels=tokens).loss.backward()
                compare_gradients(model, bare)
                for optimizer in steps:
                    optimizer.step()


@pytest.mark.verifies("xtrain.zero.fsdp_schedule:UnitSchedule")
def test_models_of_transformers_with_gradient_checkpointing_train_alike(world):
    pytest.importorskip("transformers")
    world(2).run(of_transformers)


class OneIdle(nn.Module):
    """Of two layers one takes no part."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def relied_on():
    rank, rate, decay = dist.get_rank(), 0.1, 0.5
    torch.manual_seed(0)
    bare = OneIdle().double()
    copied = copy.deepcopy(bare)
    early = torch.optim.AdamW(copied.parameters(), lr=rate, weight_decay=decay)
    model = FullyShardedDataParallel(copied)
    right = torch.optim.AdamW(bare.used.parameters(), lr=rate, weight_decay=decay)
    assert model.full_shapes() == {n: p.shape for n, p in bare.named_parameters()}
    assert {p.ndim for p in model.parameters()} == {1}
    start = model.full_state_dict()
    for module, optimizer in ((model, early), (bare, right)):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    found = model.full_state_dict()
    for name, weight in bare.state_dict().items():
        shrunk = (1 - rate * decay) ** 3 if name.startswith("idle") else 1
        torch.testing.assert_close(found[name], weight * shrunk, msg=name)
    model.load_full_state_dict(start)
    for name, weight in model.full_state_dict().items():
        assert torch.equal(weight, start[name]), name
    wrong = {**start, "idle.bias": torch.ones(2)} if rank else start
    with pytest.raises(ValueError, match=r"rank 1: idle.bias is \[2\] in state, and"):
        model.load_full_state_dict(wrong)
    missing = {name: weight for name, weight in found.items() if name != "idle.bias"}
    with pytest.raises(ValueError, match=r"1 names differ; idle.bias is missing"):
        model.load_full_state_dict(missing)
    for name, weight in model.full_state_dict().items():
        assert torch.equal(weight, start[name]), name  # a refusal changes nothing


@pytest.mark.verifies(
    FSDP,
    "xtrain.zero.flat_param_group:become_shard",
    "xtrain.zero.fsdp_checkpoint:load_full_state",
)
def test_what_programs_around_it_rely_on(world):
    """An optimizer made before, whole shapes and tensors, decay of what is idle."""
    world(2).run(relied_on)


def compiled(kind):
    torch.manual_seed(0)
    bare = Blocks(False, None).double()
    copied = copy.deepcopy(bare)
    compile_it = partial(torch.compile, backend="eager")
    if kind == "blocks":
        for layer in copied.layers:
            layer.compile(backend="eager")
    if kind == "inside":
        copied = compile_it(copied)
    model = FullyShardedDataParallel(copied)
    called = compile_it(model) if kind == "around" else model
    x = torch.ones(2, 3, dtype=torch.float64)
    for module in (called, bare):
        module(x).square().sum().backward()
    named = {f"_orig_mod.{n}": p for n, p in bare.named_parameters()}
    compare_gradients(model, bare if kind != "inside" else named)


@pytest.mark.verifies(FSDP)
def test_torch_compile_around_it_and_inside_it(world):
    for kind in ("around", "blocks", "inside"):
        world(2).run(compiled, kind)


def own_pieces():
    """state_dict and named_parameters have the same names; what is saved comes back."""
    rank = dist.get_rank()
    model, other = wrap(0), wrap(1)
    state = model.state_dict()
    bare = make_model(0)
    assert list(state) == list(bare.state_dict())
    assert [n for n, _ in model.named_buffers()] == ["scale"]
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name], parameter)
    other.load_state_dict(state)
    assert largest_difference(other.full_state_dict(), dict(bare.state_dict())) == 0.0
    loss_of(other, batch_of(0, 0, rank)).backward()  # pieces are still the shards'
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(bare.state_dict())
    return {name: tensor.numel() for name, tensor in state.items()}


@pytest.mark.verifies(UNIT, FSDP)
def test_a_state_dict_holds_this_ranks_pieces_under_bare_names(world):
    first, second = world(2).run(own_pieces)
    whole = make_model(0).state_dict()
    for name in whole.keys() - {"scale"}:
        assert first[name] + second[name] == whole[name].numel()
