"""What the wrappers ask of a module: filled, trainable, the same on every rank."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import check_same


def check_same_model(
    module: nn.Module,
    group: ProcessGroup | None,
    options: Mapping[str, object] | None = None,
    problem: str | None = None,
) -> None:
    """ValueError on every rank unless all have the same names, shapes and dtypes.

    Also if a rank was given other `options`, or has found a `problem`.
    """
    check_same("models", named_tensors(module), group, options, problem)


def check_trainable(module: nn.Module) -> None:
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no parameter that requires a gradient")


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
