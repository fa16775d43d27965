"""Mistakes on context ranks: each is made on purpose, and the comparison sees it.

And what ranks cannot do together: refused on all of them, before anything is sent.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from tests.devices import skip_unless_mistakes_are_told
from tests.model.twins import LENGTH, Case, Twins, config_of, sparse_batch
from xtrain.cluster.per_rank import replaced
from xtrain.comm import CommLedger, init_mesh
from xtrain.model import XtrainModel, decoder
from xtrain.model.context import SequenceCut

MODEL = "xtrain.model.decoder:XtrainModel"
CUT = ("xtrain.model.context:SequenceCut", "xtrain.model.context:sequence_cut")
CHECKS = ("xtrain.model.context:check_options", "xtrain.model.mesh_axes:check_mesh")


def local_positions(cut):
    """0, 1, 2, ... on every rank."""
    run = cut.run

    def wrong(x, positions=None, *rest):
        del positions, rest
        local = torch.arange(x.shape[1]) % (x.shape[1] // 2)
        unsharded = cut.context.unshard(local[: x.shape[1] // 2], 0)
        return run(x, unsharded)

    return mock.patch.object(cut, "run", wrong)


def mean_of_means(cut):
    """Each rank divides by how many labels it has."""
    del cut
    right = decoder.mean_cross_entropy

    def wrong(logits, labels, tensor, data, count, context):
        if context is None:  # the whole model
            return right(logits, labels, tensor, data, count)
        own = (labels != -100).sum()
        return right(logits, labels, tensor, data, own * context.size(), context)

    return replaced(decoder, "mean_cross_entropy", wrong)


def local_loss(cut):
    """The sum of the rank's own tokens, over the count of all."""
    del cut
    right = decoder.mean_cross_entropy
    return replaced(decoder, "mean_cross_entropy", lambda *args: right(*args[:-1]))


def gradients_not_summed(cut):
    return mock.patch.object(cut, "sync_gradients", return_value=None)


def gradients_averaged(cut):
    right = cut.sync_gradients

    def wrong():
        right()
        for parameter in cut.parameters():
            parameter.grad /= 2

    return mock.patch.object(cut, "sync_gradients", wrong)


def gradients_summed_twice(cut):
    right = cut.sync_gradients

    def wrong():
        right()
        right()

    return mock.patch.object(cut, "sync_gradients", wrong)


def labels_in_runs(cut):
    """Tokens are cut by zigzag, labels into runs."""
    del cut
    right = SequenceCut.shard

    def wrong(self, x, dim=1):
        is_labels = x.dim() == 2 and bool((x == -100).any())
        return right(self._replace(balance="none") if is_labels else self, x, dim)

    return replaced(SequenceCut, "shard", wrong)


def gathered_rank_after_rank(cut):
    del cut
    right = SequenceCut.unshard
    return replaced(
        SequenceCut,
        "unshard",
        lambda self, x, dim=1: right(self._replace(balance="none"), x, dim),
    )


def attention_over_runs(cut):
    """The mask of contiguous parts for tokens cut by zigzag."""
    del cut
    right = SequenceCut.attend
    return replaced(
        SequenceCut,
        "attend",
        lambda self, *args, **options: right(
            self._replace(balance="none"), *args, **options
        ),
    )


MISTAKES = {
    local_positions: "logits",
    mean_of_means: "loss",
    local_loss: "loss",
    gradients_not_summed: "gradient",
    gradients_averaged: "gradient",
    gradients_summed_twice: "gradient",
    labels_in_runs: "loss",
    gathered_rank_after_rank: "gathered logits",
    attention_over_runs: "logits",
}


def first_difference(mistake, case: Case) -> str:
    """What a comparison says first; "" if all is equal."""
    twins = Twins(case)
    with patched(mistake, twins, case):
        try:
            tokens, labels = sparse_batch(2)
            twins.check_logits(tokens, None)
            twins.gradients(tokens, labels)
            twins.check_gradients()
        except AssertionError as error:
            return str(error)
    return ""


@contextmanager
def patched(mistake, twins, case):
    """The mistake made; a model that calls another `attend` is built anew."""
    with nullcontext() if mistake is None else mistake(twins.cut):
        if mistake is attention_over_runs:
            twins.cut = case.model()
        yield


def all_differences() -> list[str]:
    return [first_difference(mistake, Case(context=2)) for mistake in (None, *MISTAKES)]


@pytest.mark.verifies(MODEL, *CUT)
def test_each_mistake_is_seen_where_it_shows_first(world):
    for right, *wrong in world(2).run(all_differences):
        assert right == ""
        for (mistake, place), said in zip(MISTAKES.items(), wrong, strict=True):
            assert f" {place}" in said, f"{mistake.__name__}: {said[:300]}"


# -- refused


def refused() -> list[str]:
    """What the model says on this rank; nothing is sent before."""
    mesh, said = init_mesh((2, 2), ("context", "tensor")), []
    tokens = sparse_batch(0)[0]

    def tries(match, call, sent=0):
        with CommLedger() as ledger, pytest.raises(ValueError, match=match) as caught:
            call()
        assert len(ledger.events) == sent, ledger.events
        said.append(str(caught.value))

    def build(**options):
        heads = options.pop("heads", 12)
        config = config_of(num_attention_heads=heads, num_key_value_heads=2)
        return XtrainModel(config, mesh, **options)

    zigzag = build()
    striped = build(context_balance="striped")
    sequence = build(sequence_parallel=True, context_balance="none")
    tries("10 cannot be cut into 4 equal parts for balance='zigzag' on 2 ranks: pad it "
          "to 12", lambda: zigzag(tokens[:, :10]))  # fmt: skip
    tries("into 2 equal parts for balance='striped'", lambda: striped(tokens[:, :9]))
    tries("sequence of 22 on 2 context ranks: 11 is not divisible by 2",
          lambda: sequence(tokens[:, :22]))  # fmt: skip
    tries("22 cannot", lambda: zigzag.loss(tokens[:, :22], tokens[:, :22]))
    tries("context_attention='rings' is none of ring, all_gather, ulysses",
          lambda: build(context_attention="rings"))  # fmt: skip
    tries("context_balance='zig' is none of none, striped, zigzag",
          lambda: build(context_balance="zig"))  # fmt: skip
    both = {"context_attention": "ulysses", "context_balance": "zigzag"}
    tries("context_balance='zigzag' with context_attention=", lambda: build(**both))
    tries("a tensor rank has 3 of 6 query heads",
          lambda: build(context_attention="ulysses", heads=6))  # fmt: skip
    tries("attention= is for whole sequences, but 2 context ranks have parts",
          lambda: build(attention=lambda *args, **options: args[0]))  # fmt: skip
    return said


@pytest.mark.verifies(MODEL, *CUT, *CHECKS)
def test_what_cannot_be_cut_is_refused_on_all_ranks_before_anything_is_sent(world):
    first, *others = world(4).run(refused)
    assert len(first) == 9
    assert all(said == first for said in others)


def one_rank() -> None:
    """An axis of one cuts nothing: any length, any attention; options are checked."""
    mesh = init_mesh((1,), ("context",))
    whole = XtrainModel(config_of())
    tokens = sparse_batch(0)[0][:, :7]
    once = XtrainModel(config_of(), mesh, attention=whole.layers[0].self_attn.attention)
    assert once.context is None
    assert torch.equal(once(tokens, gather_logits=True), whole(tokens))
    for bad in ({"context_attention": "flash"}, {"context_balance": "even"}):
        with pytest.raises(ValueError, match="is none of"):
            XtrainModel(config_of(), mesh, **bad)
        with pytest.raises(ValueError, match="is none of"):
            XtrainModel(config_of(), **bad)


@pytest.mark.verifies(MODEL, *CUT)
def test_an_axis_of_one_cuts_nothing(world):
    world(1).run(one_rank)


def wrong_on_one_data_rank() -> list[str]:
    """The last data rank brings a sequence that cannot be cut; then a good batch."""
    mesh = init_mesh((2, 2), ("data", "context"))
    model = XtrainModel(config_of(), mesh)
    tokens, labels = sparse_batch(mesh["data"].get_local_rank())
    length = LENGTH - 2 * mesh["data"].get_local_rank()
    with pytest.raises(ValueError, match="^ranks 2, 3: a sequence of 22 ") as caught:
        model.loss(tokens[:, :length], labels[:, :length])
    assert model.loss(tokens, labels).isfinite()
    return str(caught.value)


@pytest.mark.verifies(MODEL, "xtrain.model.loss:count_labels")
def test_a_sequence_of_one_data_rank_that_cannot_be_cut_is_named_on_all(
    world, xtrain_worlds
):
    skip_unless_mistakes_are_told(xtrain_worlds)
    assert len(set(world(4).run(wrong_on_one_data_rank))) == 1
