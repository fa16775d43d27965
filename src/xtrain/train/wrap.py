"""One wrapper for every layout: which ranks sum a gradient, and what holds it then.

    kind     around each stage                       optimizer
    none     nothing; gradients are summed at the end of a step
    ddp      DistributedDataParallel                 as given
    zero1    nothing                                 ZeroOptimizer, stage 1
    zero2    nothing                                 ZeroOptimizer, stage 2
    fsdp     FullyShardedDataParallel                as given, over its shards
    hsdp     the same over neighbours, and sums over their copies

Group and reduction come from the mesh of the model: gradients are summed over "data",
or over "expert_data" where experts are on several ranks; what a wrapper has not summed,
`accumulate` sums. A whole model is one stage.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from xtrain.data_parallel import DistributedDataParallel
from xtrain.model import XtrainModel, batch_group
from xtrain.model.layer import DecoderLayer
from xtrain.model.stages import DecoderStage
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import Schedule
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer, hybrid_groups

KINDS = ("none", "ddp", "zero1", "zero2", "fsdp", "hsdp")
Part = XtrainModel | DecoderStage


def wrap(
    model: XtrainModel | Sequence[PipelineStage],
    mesh: DeviceMesh | None,
    kind: str = "ddp",
    *,
    schedule: Schedule | None = None,
    inner: int | None = None,
    reduce_at_end: bool = False,
    **options: Any,
) -> "WrappedModel":
    """A model on a mesh, ready to be trained by `accumulate` and `clip_grad_norm`.

    Args:
        model: an `XtrainModel`, or this rank's stages of one, `XtrainModel.stages`.
        mesh: that of the model.
        kind: how data ranks share the work, see above.
        schedule: of the stages.
        inner: of hsdp, how many neighbouring data ranks shard together.
        reduce_at_end: of zero2 and fsdp, keep whole gradients until the last
            micro-batch instead of reducing those of each: more memory, fewer bytes.
            The others reduce once in any case, and so does a pipeline.
        options: of the wrapper, as `bucket_cap_mb`.

    Raises:
        ValueError: on every rank: the kind is unknown, the mesh is not the model's, or
            stages have no schedule.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is none of {', '.join(KINDS)}")
    if (inner is not None) != (kind == "hsdp"):
        raise ValueError(f"inner={inner} of kind={kind!r}: hsdp alone needs it")
    if isinstance(model, XtrainModel):
        stages = [PipelineStage(model, 0, 1)]
    else:
        stages = list(model)
    parts: list[Part] = [stage.module for stage in stages]  # type: ignore[misc]
    for part in parts:
        if not isinstance(part, Part):
            raise ValueError(
                f"{type(part).__name__} is neither an XtrainModel nor one of its "
                "stages, bare: wrap it once"
            )
        if part.mesh is not mesh:
            raise ValueError("mesh is not the one that the model was made for")
    if schedule is None and not isinstance(model, XtrainModel):
        raise ValueError("stages need the schedule they were made for: schedule=")
    if kind in ("ddp", "fsdp", "hsdp"):
        around = wrapper(kind, mesh, inner, options)
        for stage in stages:
            stage.module = around(stage.module)
    once = reduce_at_end or kind in ("ddp", "zero1")
    return WrappedModel(stages, parts, mesh, kind, schedule, options, once)


def wrapper(
    kind: str, mesh: DeviceMesh | None, inner: int | None, options: dict[str, Any]
) -> Callable[[nn.Module], nn.Module]:
    """What goes around each stage."""
    if kind == "ddp":
        return partial(DistributedDataParallel, **options)
    options = {"blocks": [DecoderLayer], **options}
    if kind == "hsdp":
        assert inner is not None
        shards, copies = hybrid_groups(inner, mesh=mesh)
        options |= {"process_group": shards, "replicate_group": copies}
    return partial(FullyShardedDataParallel, **options)


class WrappedModel(nn.Module):
    """The stages of a model in their wrapper; `wrap` makes it.

    Names of parameters are those of the whole model. `stages` are this rank's, a whole
    model as one; `parts` are the modules in them, bare.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        parts: list[Part],
        mesh: DeviceMesh | None,
        kind: str,
        schedule: Schedule | None,
        options: dict[str, Any],
        reduces_once: bool = True,
    ):
        super().__init__()
        self.registered = nn.ModuleList(stages)
        self.__dict__["stages"] = stages
        self.__dict__["parts"] = parts  # they are in the stages already
        self.__dict__["_part_of"] = {
            name: part for part in parts for name, _ in part.named_parameters()
        }
        self.mesh, self.kind, self.schedule = mesh, kind, schedule
        self.config, self.options = parts[0].config, options
        self.zero: ZeroOptimizer | None = None
        self.reduces_once = reduces_once
        self.dropout_seed: int | None = None
        if self.config.attention_dropout:
            for part in parts:
                for name, layer in part.layers.named_children():
                    attention = layer.get_submodule("self_attn")
                    seeds = partial(self._reseed, int(name))
                    attention.register_forward_pre_hook(seeds)
        self._runner: PipelineRunner | None = None

    stages: list[PipelineStage]
    parts: list[Part]
    _part_of: dict[str, Part]

    def _reseed(self, number: int, *_: Any) -> None:
        """A layer's masks are the same for any layout: they follow from its number."""
        if self.dropout_seed is not None:
            words = f"{self.dropout_seed} {number}".encode()
            seed = int.from_bytes(blake2b(words, digest_size=7).digest(), "big")
            torch.default_generator.manual_seed(seed)

    @property
    def is_whole(self) -> bool:
        """One model, not stages of a pipeline."""
        return self.schedule is None

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that bring other batches."""
        return batch_group(self.mesh)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The call of the whole model; a pipeline's is `accumulate` or `evaluate`."""
        if not self.is_whole:
            raise ValueError("stages of a pipeline run by accumulate() or evaluate()")
        output: Tensor = self.stages[0].module(*args, **kwargs)
        return output

    def optimizer(
        self,
        optimizer_class: Callable[..., Optimizer] = torch.optim.AdamW,
        groups: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> Optimizer:
        """The optimizer of this rank's part of the model; of ZeRO it holds the shards.

        Args:
            optimizer_class: called with groups and options; by ZeRO with its shards.
            groups: `parameter_groups()` unless given: weight decay is for matrices
                alone, norms and biases have none.
        """
        if self.zero is not None:
            raise ValueError("the model has its optimizer already: ZeRO makes one")
        groups = groups or self.parameter_groups()
        if not self.kind.startswith("zero"):
            return optimizer_class(groups, **options)
        stage = int(self.kind[-1])
        self.zero = ZeroOptimizer(
            groups, optimizer_class, stage, **self.options, **options
        )
        for part in self.stages:
            part.reduction = self.zero
        return self.zero

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices, and what gets no weight decay; all ranks have both groups."""
        dims = {}
        for stage, part in zip(self.stages, self.parts, strict=True):
            around, shapes = stage.module, {}
            if isinstance(around, FullyShardedDataParallel):  # its pieces are flat
                shapes = around.full_shapes()
            for name, parameter in part.named_parameters():
                if parameter.requires_grad:
                    dims[parameter] = len(shapes.get(name, parameter.shape))
        matrices = [p for p, dim in dims.items() if dim > 1]
        others = [p for p, dim in dims.items() if dim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def check_ready(self) -> None:
        """ValueError if nothing would reduce the gradients: ZeRO's optimizer does."""
        if self.kind.startswith("zero") and self.zero is None:
            raise ValueError(f"{self.kind} shards in its optimizer: make that first")

    def runner(self) -> PipelineRunner:
        """Of the stages, when they are wrapped; made once."""
        if self._runner is None:
            assert self.schedule is not None and self.mesh is not None
            loss_fn: Any = no_loss
            for part in self.parts:
                if part.has_head:
                    loss_fn = part.loss_fn
            self._runner = PipelineRunner(
                self.stages,
                self.schedule,
                loss_fn,
                self.mesh["pipeline"].get_group(),
                data_group=self.data_group,
            )
        return self._runner

    def compile_layers(self) -> None:
        """Have torch compile each layer, when it first runs."""
        for part in self.parts:
            for layer in part.layers:
                layer.compile()

    # -- as one module whose ranks hold slices, for checkpoints

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """By the names of the whole model."""
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's slices, by the names of the whole model."""
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= part.state_dict(*args, **kwargs)
        return found

    def placement(self, name: str) -> Any:
        """Which slice of the parameter `name` this rank holds."""
        return self._part_of[name].placement(name)

    def all_ranks(self) -> ProcessGroup | None:
        """The ranks that save, load and clip together."""
        return self.parts[0].all_ranks()


def no_loss(output: Any, target: Any) -> Any:
    raise AssertionError("a loss is asked of a rank without the last stage")
