"""Bytes of model state per device: weights, gradients and optimizer state by stage.

    recipe zero16     weights 2 + gradients 2 + master 4 + moments 8 = 16 a parameter

    stage 0   everything whole                              16
    stage 1   master and moments over N ranks               4 + 12/N
    stage 2   gradients too                                 2 + 14/N
    stage 3   weights too                                   16/N

How many bytes a parameter costs depends on who counts what, so it is never a bare
number here but a `Recipe`. Activations come on top.

Sources: Rajbhandari et al., ZeRO, 2020, section 3.1, section 5 and table 1 (zero16);
Korthikanti et al., Reducing Activation Recomputation, 2022, figure 1 (megatron18).
"""

from dataclasses import dataclass

from xtrain.plan.checks import require_one_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes per parameter of everything that a training step keeps.

    Which stage divides what: master weights and moments from 1 on, gradients from 2
    on, weights in 3.
    """

    name: str
    weight: int
    gradient: int
    main_gradient: int
    """A second copy of the gradients that the optimizer reads, or the only one if
    `gradient` is 0."""
    master: int
    moments: int

    @property
    def total(self) -> int:
        """Bytes per parameter of plain data parallelism."""
        return self.weight + self.gradients + self.optimizer

    @property
    def gradients(self) -> int:
        return self.gradient + self.main_gradient

    @property
    def optimizer(self) -> int:
        return self.master + self.moments


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # 16-bit weights and gradients, fp32 copy of the weights, Adam: the ZeRO paper.
        Recipe("zero16", 2, 2, 0, 4, 8),
        # 16-bit weights, gradients summed in fp32, fp32 copy, Adam: Megatron with bf16.
        Recipe("megatron18", 2, 0, 4, 4, 8),
        # 16-bit weights and gradients, and an fp32 copy of both, Adam.
        Recipe("fp32_accum20", 2, 2, 4, 4, 8),
        # Everything fp32, Adam: no second copy of weights or gradients.
        Recipe("fp32", 4, 4, 0, 0, 8),
    )
}


def recipe_of(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; ValueError names those that are known."""
    if isinstance(recipe, Recipe):
        return recipe
    require_one_of("recipe", recipe, RECIPES)
    return RECIPES[recipe]


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes per device of model state."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights and moments."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def zero_memory(
    parameters: int, ranks: int, stage: int, recipe: str | Recipe = "zero16"
) -> int:
    """Bytes per device of weights, gradients and optimizer state.

    Args:
        parameters: of the model, or of this device's part of it.
        ranks: that share the state (the data parallel size).
        stage: 0 for plain data parallelism, 1, 2 or 3.
        recipe: a name of `RECIPES`, or your own.

    What is divided is padded to a multiple of `ranks`, as flat shards are.
    """
    return state_memory(parameters, ranks, stage, recipe).total


def state_memory(
    parameters: int, ranks: int, stage: int, recipe: str | Recipe = "zero16"
) -> StateMemory:
    """`zero_memory` by what the bytes hold."""
    require_one_of("stage", stage, (0, 1, 2, 3))
    if parameters < 0 or ranks < 1:
        raise ValueError(
            f"parameters={parameters} must not be negative, ranks={ranks} not below 1"
        )
    recipe = recipe_of(recipe)
    shard = -(-parameters // ranks)
    held = [parameters if stage < divided_from else shard for divided_from in (3, 2, 1)]
    return StateMemory(
        weights=held[0] * recipe.weight,
        gradients=held[1] * recipe.gradients,
        optimizer=held[2] * recipe.optimizer,
    )
