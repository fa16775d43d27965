"""The parts of a training step that are the same for every layout.

    loss = accumulate(model, tokens, labels, micro_batches=4)    all gradients, summed
    norm = clip_grad_norm(model, 1.0)                            of the full model
    optimizer.step(); optimizer.zero_grad()

`train_step` does these of a recipe.
The loss is the sum over all tokens with a label, on all ranks and in all micro-batches,
divided once by their count. So micro-batches weigh as their labels do.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from xtrain.comm.batch_rows import micro_batches_begin, rows_from
from xtrain.model.balance import update_biases
from xtrain.model.loss import IGNORED
from xtrain.model.stage_gradients import gradients_of
from xtrain.pipeline_parallel.micro_batch import micro_batches as cut
from xtrain.train.batches import Batch
from xtrain.train.phases import Place
from xtrain.train.rates import rate_at
from xtrain.train.recipe import Recipe
from xtrain.train.wrap import WrappedModel
from xtrain.zero.clip import clip_sharded_grad_norm_


def train_step(
    model: WrappedModel,
    optimizer: Optimizer,
    batch: Batch,
    recipe: Recipe,
    step: int = 0,
    *,
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    leaves_out: Callable[[float, float, Callable[[], Tensor]], object] | None = None,
    place: Place | None = None,
) -> tuple[float, float]:
    """One update of the weights; the loss of all ranks, and the gradients' norm.

    Args:
        batch: this rank's, on the model's device.
        step: of the recipe, from 0.
        computing: a context around forward and backward.
        leaves_out: whether weights stay as they are, by the loss, the norm, and what
            runs forward and backward again.
        place: told the phases.
    """
    place = place or Place()
    factor = rate_at(step, recipe.rate, recipe.steps)
    for group in optimizer.param_groups:
        group["lr"] = recipe.optimizer.lr * factor

    def gradients() -> Tensor:
        with computing():
            return accumulate(
                model, batch.tokens, batch.labels, documents=batch.documents,
                micro_batches=recipe.layout.micro_batches,
                first_row=batch.first % recipe.batch,
                dropout_seed=step * 2**32 + recipe.seed, place=place,
            )  # fmt: skip

    loss = gradients()
    place.enter("clip")
    limit = float("inf") if recipe.max_norm is None else recipe.max_norm
    found = loss.item(), clip_grad_norm(model, limit).item()
    if leaves_out is not None and leaves_out(*found, gradients):
        return found
    place.enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    update_balance_biases(model, recipe.optimizer.balance_rate)
    return found


def accumulate(
    model: WrappedModel,
    tokens: Tensor,
    labels: Tensor,
    *,
    documents: Tensor | None = None,
    micro_batches: int = 1,
    first_row: int = 0,
    dropout_seed: int | None = None,
    place: Place | None = None,
) -> Tensor:
    """Forward and backward of this rank's batch; the loss of all ranks' batches.

    Gradients are complete on return: summed over all axes of the mesh, whole or as
    shards. Every rank of the mesh calls it; those of a pipeline, context and tensor
    group give the same batch.

    Args:
        tokens, labels: [B, S]; a label of -100 does not count.
        documents: [B, S], see `XtrainModel.forward`.
        micro_batches: of one model: how many, one after the other; of fewer rows some
            are empty, and weigh nothing. Stages have those of their schedule.
        first_row: the number of this rank's first row in the batch of all data ranks.
        dropout_seed: another number in each step: with it and `first_row` the masks of
            dropout are the same in any layout. Without it they are drawn from torch's
            generator.
        place: told which way a micro-batch goes.

    Raises:
        ValueError: on every rank: the batch does not fit the model, or has fewer rows
            than a schedule has micro-batches.
    """
    place = place or Place()
    place.enter("forward" if model.is_whole else "forward and backward")
    model.check_ready()
    model.dropout_seed = dropout_seed
    if model.schedule is not None:
        micro_batches = model.schedule.micro_batches
    rows = cut(torch.arange(first_row, first_row + len(tokens)), micro_batches)
    begins = [int(part[0]) if len(part) else 0 for part in rows]
    if model.is_whole:
        loss = of_one_model(model, tokens, labels, documents, begins, place)
    else:
        with micro_batches_begin(begins):
            loss = model.runner().step(stage_inputs(tokens, documents), labels)
    for part in model.parts:
        part.sync_gradients()
    return loss


def stage_inputs(tokens: Tensor, documents: Tensor | None) -> Any:
    """What the first stage is called with."""
    if documents is None:
        return tokens
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return tokens, positions, documents >= 0, documents


def of_one_model(
    model: WrappedModel,
    tokens: Tensor,
    labels: Tensor,
    documents: Tensor | None,
    begins: list[int],
    place: Place,
) -> Tensor:
    """The gradients of one model, which its wrapper reduces in backward."""
    reduction, micro_batches = model.stages[0].reduction, len(begins)
    parts = cut([tokens, labels], micro_batches)
    masks: list[Any] = cut(documents, micro_batches) or [None] * micro_batches
    shares = weights(model, labels, micro_batches)
    total = torch.zeros((), device=tokens.device)
    for number, (x, y) in enumerate(parts):
        is_last = number == micro_batches - 1
        context: Any = nullcontext()
        if reduction is not None and not is_last:
            context = waiting(model, reduction)
        with context, rows_from(begins[number]):
            place.enter("forward")
            loss = shares[number] * model(x, y, **limits(masks[number]))
            place.enter("backward")
            loss.backward()
        total = total + loss.detach()
    return total


def waiting(model: WrappedModel, reduction: Any) -> AbstractContextManager[Any]:
    """What a micro-batch that is not the last one leaves for later."""
    if model.reduces_once:
        return reduction.no_sync()  # type: ignore[no-any-return]
    if model.kind == "hsdp":  # sums over copies go over the network
        return reduction.no_all_reduce()  # type: ignore[no-any-return]
    return nullcontext()


def weights(model: WrappedModel, labels: Tensor, micro_batches: int) -> Tensor:
    """The share of each micro-batch in the labels of the step, on all ranks."""
    counts = [(part != IGNORED).sum() for part in cut(labels, micro_batches)]
    found = torch.stack(counts).double()
    group = model.data_group
    if group is not None and group.size() > 1:
        dist.all_reduce(found, group=group)
    return (found / found.sum().clamp(min=1)).to(labels.device)


@torch.no_grad()
def evaluate(
    model: WrappedModel,
    tokens: Tensor,
    labels: Tensor,
    *,
    documents: Tensor | None = None,
) -> Tensor:
    """The loss of all ranks' batches, without gradients; the same on every rank."""
    if not model.is_whole:
        return model.runner().evaluate(stage_inputs(tokens, documents), labels)
    loss: Tensor = model(tokens, labels, **limits(documents))
    return loss


def limits(documents: Tensor | None) -> dict[str, Tensor]:
    """What tokens see, and that padding is routed to no expert."""
    if documents is None:
        return {}
    return {"documents": documents, "token_mask": documents >= 0}


def clip_grad_norm(model: WrappedModel, max_norm: float) -> Tensor:
    """Scale all gradients to a norm of at most `max_norm`; what it was before.

    After `accumulate`, on every rank. The norm is that of the full model in one
    process, whatever the wrapper: what several ranks hold alike counts once.
    """
    held = gradients_of(model.stages)
    gradients, counts = [g for g, _ in held], [count for _, count in held]
    return clip_sharded_grad_norm_(gradients, max_norm, model.all_ranks(), counts)


def update_balance_biases(model: WrappedModel, rate: float = 1e-3) -> None:
    """After a step: move the routers' biases towards equal loads of the experts.

    Every rank calls it; a model without `balance_bias` is left as it is.
    """
    if model.config.balance_bias:
        update_biases(model.parts, rate)
