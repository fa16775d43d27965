"""Which modules of a model become units of ZeRO 3, and which parameters are theirs."""

from collections.abc import Callable, Iterable

from torch import nn

from xtrain.zero.flat_param_group import FlatParamGroup, Owner
from xtrain.zero.fsdp_unit import FSDPUnit


def make_units(
    root: nn.Module, chosen: list[nn.Module], make_group: Callable[..., FlatParamGroup]
) -> list[FSDPUnit]:
    """The root's unit, then one for each chosen module.

    Every parameter goes to the innermost unit that holds all modules that have it.
    """
    owners: dict[nn.Parameter, list[Owner]] = {}
    block_of: dict[nn.Parameter, nn.Module] = {}
    nearest = nearest_block(root, chosen)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owners.setdefault(parameter, []).append((module, name))
            if block_of.setdefault(parameter, nearest[module]) is not nearest[module]:
                block_of[parameter] = root  # tied across units
    names = {p: name for name, p in root.named_parameters()}
    units = []
    for module in [root, *chosen]:
        kinds: dict[object, dict[nn.Parameter, list[Owner]]] = {}
        for parameter, places in owners.items():
            if block_of[parameter] is module:
                kind = (parameter.dtype, parameter.requires_grad)
                kinds.setdefault(kind, {})[parameter] = places
        groups = [make_group(members, names) for members in kinds.values()]
        units.append(FSDPUnit(module, groups))
    return units


def find_blocks(
    root: nn.Module, blocks: Iterable[type[nn.Module] | str] | None
) -> list[nn.Module]:
    """The modules to be gathered one by one; see FullyShardedDataParallel."""
    if blocks is None:
        lists = [m for m in root.modules() if isinstance(m, nn.ModuleList)]
        return [child for entries in lists for child in entries]
    wanted = list(blocks)
    names = {entry for entry in wanted if isinstance(entry, str)}
    classes = tuple(entry for entry in wanted if not isinstance(entry, str))
    return [
        module
        for name, module in root.named_modules()
        if module is not root and (name in names or isinstance(module, classes))
    ]


def nearest_block(
    root: nn.Module, chosen: list[nn.Module]
) -> dict[nn.Module, nn.Module]:
    """For each module the innermost chosen one around it, or the root."""
    nearest: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module, block: nn.Module) -> None:
        block = module if any(module is m for m in chosen) else block
        nearest[module] = block
        for child in module.children():
            visit(child, block)

    visit(root, root)
    return nearest
