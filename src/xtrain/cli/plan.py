"""`xtrain plan`: the layouts of a model on devices, ranked; others by broken rule."""

import argparse
import json
from typing import Any

from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.checks import require_whole
from xtrain.plan.config_json import load_shape
from xtrain.plan.estimate import Assumptions, Estimate
from xtrain.plan.hardware import ACCELERATORS, Accelerator
from xtrain.plan.kernels import ATTENTION
from xtrain.plan.memory import RECIPES
from xtrain.plan.published import PUBLISHED
from xtrain.plan.search import SearchResult, SearchSpace, search
from xtrain.plan.shapes import PRESETS, ModelShape
from xtrain.plan.step_traffic import sent_by_axis, traffic_per_step
from xtrain.plan.transfer import DTYPES
from xtrain.plan.whole_run import WholeRun, whole_run

GIB, GIGABIT = 2**30, 1e9 / 8
PRECISIONS = ("bf16", "fp16", "fp8", "fp4")
AXES = ("tensor", "pipeline", "context", "expert")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain plan`."""
    models = ", ".join(sorted({*PRESETS, *PUBLISHED}))
    add = parser.add_argument
    add("--model", required=True, metavar="NAME_OR_PATH",
        help=f"{models}, or the path of a Hugging Face config.json")  # fmt: skip
    add("--gpus", required=True, type=int, help="how many devices")
    add("--gpu", default="h100", metavar="NAME", help=", ".join(sorted(ACCELERATORS)))
    add("--sequence", type=int, default=4096, help="tokens of one sequence")
    add("--batch", type=int, help="sequences of a step; 8 a device unless given")
    for axis in AXES:
        add(f"--{axis}", type=int, help=f"only this many {axis} ranks")
    add("--zero", type=int, choices=range(4), help="only this stage")
    add("--recompute", choices=RECOMPUTE, help="only this")
    add("--chunks", type=int, metavar="N",
        help="of interleaved schedules; 2 and 4 unless given")  # fmt: skip
    add("--hybrid", action="store_true",
        help="try ZeRO-3 inside a node with copies across nodes, too")  # fmt: skip
    add("--offload", action="store_true",
        help="try the optimizer's state in the host's memory, too")  # fmt: skip
    add("--recipe", default="megatron18", choices=sorted(RECIPES), metavar="NAME",
        help="bytes a parameter: " + ", ".join(sorted(RECIPES)))  # fmt: skip
    add("--dtypes", default="megatron-bf16", choices=sorted(DTYPES), metavar="NAME",
        help="of what travels: " + ", ".join(sorted(DTYPES)))  # fmt: skip
    add("--gpus-per-node", type=int, metavar="N",
        help="devices that the fast link joins; as the accelerator has it")  # fmt: skip
    add("--precision", default="bf16", choices=PRECISIONS, help="of the products")
    add("--attention", default="flash", choices=ATTENTION, help="its kernel")
    add("--tensor-overlap", action="store_true",
        help="tensor ranks send in pieces, behind their products")  # fmt: skip
    add("--network", type=float, metavar="GBITS", help="Gbit/s of a device's adapter")
    add("--memory", type=float, metavar="GIB", help="of a device; the vendor's figure")
    add("--reserve", type=float, default=4.0, metavar="GIB", help="to be left free")
    add("--top", type=int, default=10, help="layouts shown")
    add("--explain", action="store_true",
        help="why the first, what limits it, what would change it")  # fmt: skip
    add("--tokens", type=float, help="of the whole run: days, failures, goodput")
    add("--price", type=float, help="dollars for a device hour, with --tokens")
    add("--json", action="store_true", help="the same as data")


def run(arguments: argparse.Namespace) -> int:
    """Search and show; 1 if no layout fits."""
    require_whole("top", arguments.top)
    if arguments.price is not None and arguments.tokens is None:
        raise ValueError("--price takes --tokens, the tokens of the run")
    shape = load_shape(arguments.model)
    device = Accelerator.preset(arguments.gpu)
    assumed = assumptions_of(arguments, device)
    batch = 8 * arguments.gpus if arguments.batch is None else arguments.batch
    result = search(
        shape,
        device,
        arguments.gpus,
        arguments.sequence,
        batch,
        space=space_of(arguments),
        assumptions=assumed,
    )
    shown = result.found[: arguments.top]
    whole = None
    if arguments.tokens is not None and shown:
        whole = run_of(shape, arguments, shown[0])
    if arguments.json:
        data = as_data(shape, arguments, batch, result, shown)
        data["whole_run"] = whole and whole._asdict()
        print(json.dumps(data, indent=1))
    else:
        from xtrain.cli.plan_tables import show  # rich, which --json does without

        show(shape, device, arguments, batch, assumed, result, shown, whole)
    return 0 if result.found else 1


def assumptions_of(arguments: argparse.Namespace, device: Accelerator) -> Assumptions:
    """The words of the command line as `Assumptions`."""
    memory = arguments.memory
    return Assumptions(
        gpus_per_node=arguments.gpus_per_node,
        precision=arguments.precision,
        attention=arguments.attention,
        tensor_overlap=arguments.tensor_overlap,
        network=None if arguments.network is None else arguments.network * GIGABIT,
        recipe=arguments.recipe,
        dtypes=arguments.dtypes,
        capacity=device.memory if memory is None else memory * GIB,
        reserve=arguments.reserve * GIB,
    )


def space_of(arguments: argparse.Namespace) -> SearchSpace:
    """All values, or the ones of the command line."""
    chosen: dict[str, Any] = {}
    for name in (*AXES, "zero", "recompute"):
        value = getattr(arguments, name)
        if value is not None:
            chosen[name] = (value,)
    if arguments.offload:
        chosen["offload"] = (False, True)
    if arguments.chunks is not None:
        require_whole("chunks", arguments.chunks)
        ways = [("one_f_one_b", 1), ("interleaved", arguments.chunks)]
        chosen["schedules"] = ways[: 1 + (arguments.chunks > 1)]
    if arguments.hybrid:
        device = Accelerator.preset(arguments.gpu)
        nodes = arguments.gpus // (arguments.gpus_per_node or device.node)
        chosen["replicate"] = (1, nodes) if nodes > 1 else (1,)
    return SearchSpace(**chosen)


def as_data(
    shape: ModelShape,
    arguments: argparse.Namespace,
    batch: int,
    result: SearchResult,
    shown: list[Estimate],
) -> dict[str, Any]:
    """The tables as data: bytes, seconds, shares."""
    return {
        "model": arguments.model,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "gpus": arguments.gpus,
        "gpu": arguments.gpu,
        "sequence": arguments.sequence,
        "batch": batch,
        "tried": result.tried,
        "fit": len(result.found),
        "layouts": [one_layout(shape, arguments, one) for one in shown],
        "rejected": [
            {name: getattr(one, name) for name in ("rule", "count", "example", "why")}
            for one in result.rejected
        ],
    }


def run_of(shape: ModelShape, arguments: argparse.Namespace, one: Estimate) -> WholeRun:
    """The run of `--tokens` in that layout."""
    return whole_run(
        one.tokens_per_second,
        arguments.tokens,
        arguments.gpus,
        shape.active_parameters,
        price=arguments.price,
    )


def one_layout(
    shape: ModelShape, arguments: argparse.Namespace, one: Estimate
) -> dict[str, Any]:
    """A layout with its memory, time and traffic."""
    sent = traffic_per_step(
        shape, one.layout, arguments.sequence, dtypes=arguments.dtypes
    )
    return {
        "name": str(one.layout),
        **vars(one.layout),
        "seconds": one.seconds,
        "seconds_by_part": one.parts,
        "memory": one.memory.total,
        "memory_by_part": one.memory.parts(),
        "fullest_rank": one.position,
        "verdict": one.verdict,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "causal_mfu": one.causal_mfu,
        "tokens_per_second_range": one.range,
        "hfu": one.hfu,
        "sent_by_axis": sent_by_axis(sent),
    }
