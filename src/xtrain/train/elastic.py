"""The same run on another number of ranks: the data axis takes what is there.

    nodes   ranks   layout                     a rank's share of 16 sequences
      2       8     tensor 2, data 4           4 = 2 micro-batches of 2
      1       4     tensor 2, data 2           8 = 4 micro-batches of 2
      2       8     tensor 2, data 4           4 = 2 micro-batches of 2

The global batch stays, so every step has the same samples and the loss the same curve.
A rank's micro-batches grow in number, not in sequences: its activations take the memory
they took. Nothing is sent: each rank computes it from the recipe and the world's size.

Source: the elastic agent of torchrun, https://docs.pytorch.org/docs/stable/elastic/
"""

from dataclasses import replace
from math import ceil

from xtrain.plan import Layout
from xtrain.train.recipe import Recipe


def fitted(recipe: Recipe, world: int) -> Recipe:
    """The recipe for so many ranks, as it is unless it is `elastic`.

    A micro-batch of a rank has at most as many sequences as in the recipe's layout; or
    2, where that is 1 and shares differ. Hybrid sharding keeps the ranks of a copy.

    Raises:
        ValueError: the other axes do not divide the ranks, `expert` does not divide
            the data ranks, or the global batch has too few sequences for them.
    """
    layout = recipe.layout
    if not recipe.elastic or layout.gpus == world:
        return recipe
    others = layout.gpus // layout.data
    if world % others:
        raise ValueError(
            f"elastic: {world} ranks are no multiple of pipeline {layout.pipeline} x "
            f"context {layout.context} x tensor {layout.tensor} = {others}"
        )
    data = world // others
    if data % layout.expert:
        raise ValueError(
            f"elastic: layout.expert={layout.expert} does not divide the {data} data "
            f"ranks of {world} ranks"
        )
    if recipe.batch < data:
        raise ValueError(
            f"elastic: global_batch={recipe.batch} has not one sequence for each of "
            f"the {data} data ranks of {world} ranks"
        )
    changed = replace(
        layout,
        data=data,
        micro_batch=1,
        micro_batches=micro_batches(recipe.batch, layout, data),
        replicate=copies(layout, data),
    )
    return replace(recipe, layout=changed, global_batch=recipe.batch)


def micro_batches(batch: int, layout: Layout, data: int) -> int:
    """Of a rank's share on `data` ranks, each as large as in the layout.

    A pipeline has a multiple of its ranks, if it had one.
    """
    sequences = ceil(ceil(batch / layout.data) / layout.micro_batches)
    step = 1 if layout.micro_batches % layout.pipeline else layout.pipeline
    wanted = step * ceil(batch / (data * sequences * step))
    return max(step, min(wanted, batch // data // step * step))


def copies(layout: Layout, data: int) -> int:
    """Of hybrid sharding, each on as many ranks as in the layout where these fit."""
    inner = layout.data // layout.replicate
    fit = layout.replicate > 1 and data % inner == 0
    return data // inner if fit else layout.replicate
