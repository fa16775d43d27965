"""The optimizer of a recipe, over whatever a wrapper leaves on this rank."""

from torch.optim import AdamW, Optimizer

from xtrain.train.recipe_parts import OptimizerSpec
from xtrain.train.wrap import WrappedModel


def make_optimizer(model: WrappedModel, spec: OptimizerSpec) -> Optimizer:
    """AdamW of all parameters, or Muon of the matrices and AdamW of the others."""
    if spec.kind == "muon":
        raise ValueError("optimizer.kind='muon' is not in the trainer yet: adamw")
    options = {"betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay}
    return model.optimizer(AdamW, lr=spec.lr, **options)
