"""The decoder cut into the virtual stages of a pipeline schedule.

    embedding  layer 0  layer 1 | layer 2  layer 3 | layer 4  layer 5  norm and head
              stage 0                stage 1                   stage 2

Stages cost about the same FLOPs. A rank makes the modules of its own stages alone.

Shapes: B batch, S sequence, H hidden, V vocabulary, t tensor ranks.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.model.checks import check_mesh
from xtrain.model.config import XtrainConfig
from xtrain.model.loss import IGNORED, sum_cross_entropy
from xtrain.model.placement import axis_group, axis_size
from xtrain.model.span import TIED, DecoderSpan
from xtrain.pipeline_parallel.cut import balanced_cut
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.plan import layer_flops
from xtrain.schedules import Schedule
from xtrain.tensor_parallel.shards import check_features, check_ids
from xtrain.zero.clip import clip_sharded_grad_norm_


class DecoderStage(DecoderSpan):
    """What one virtual stage holds of the decoder; called in the order of stages."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [B, S] on the first stage, else what the stage before returned.

        Activations [B, S, H], or [B, S / t, H] with sequence_parallel; logits [B, S,
        V / t] from the last stage.

        Args:
            positions: [S] or [B, S]; 0, 1, 2, ... unless given.

        Raises:
            ValueError: what is given does not fit; before anything is computed.
        """
        if self.has_embedding:
            self.check_call(x, positions=positions)
        else:
            check_features(f"decoder parts {self.span}", x, self.config.hidden_size)
        return self.run(x, positions)

    def loss_fn(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of labels other than -100 of this batch, and their count.

        Raises:
            ValueError: labels are not ids of the vocabulary, or not of the logits'
                shape.
        """
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels {list(labels.shape)} for logits {list(logits.shape)}: there "
                "is one label for each token"
            )
        check_ids(labels, self.config.vocab_size, IGNORED)
        total = sum_cross_entropy(logits, labels, self.tensor)
        return total, (labels != IGNORED).sum()


def part_costs(config: XtrainConfig, sequence: int = 1) -> list[int]:
    """FLOPs for `sequence` tokens: of the embedding, of each layer, of norm and head.

    Only matrix products count, so a look-up is free.
    """
    layers = config.num_hidden_layers
    layer = layer_flops(config, 1, sequence)
    total = config.flops_per_token(sequence, causal=True) * sequence
    return [0, *[layer] * layers, total - layers * layer]


def stage_spans(config: XtrainConfig, stages: int, sequence: int = 1) -> list[range]:
    """Which parts of the decoder, by number, each of so many stages holds."""
    costs = part_costs(config, sequence)
    if stages > len(costs):
        raise ValueError(
            f"{stages} virtual stages of {config.num_hidden_layers} layers: each needs "
            f"a layer, the embedding or the head, so there are at most {len(costs)}"
        )
    return balanced_cut(costs, stages)


def make_stages(
    config: XtrainConfig,
    mesh: DeviceMesh | None,
    schedule: Schedule,
    sequence: int = 1,
    **options: Any,
) -> list[PipelineStage]:
    """This rank's virtual stages, for `XtrainModel.stages`."""
    check_mesh(mesh, also=("pipeline",))
    ranks = axis_size(mesh, "pipeline")
    if ranks != schedule.ranks:
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.ranks} ranks, but the mesh's "
            f'axis "pipeline" has {ranks}'
        )
    group = axis_group(mesh, "pipeline")
    rank = 0 if group is None else group.rank()
    spans, made = stage_spans(config, schedule.stages, sequence), []
    for stage in schedule.stages_of(rank):
        copy = schedule.rank_of(stage, 0) != rank
        module = DecoderStage(config, mesh, spans[stage], is_copy=copy, **options)
        held = dict(module.named_parameters())
        tied = config.tie_word_embeddings and schedule.stages > 1 and TIED in held
        shared = {TIED: held[TIED]} if tied else {}
        made.append(PipelineStage(module, stage, schedule.stages, shared=shared))
    return made


def stage_modules(stages: Sequence[PipelineStage]) -> list[DecoderStage]:
    """Their modules; ValueError for another model's, or inside a wrapper."""
    modules = [stage.module for stage in stages]
    for stage, module in zip(stages, modules, strict=True):
        if not isinstance(module, DecoderStage):
            raise ValueError(
                f"stage {stage.index} is a {type(module).__name__}: give the stages "
                "that XtrainModel.stages has made"
            )
    return modules  # type: ignore[return-value]


def clip_stages_grad_norm_(stages: Sequence[PipelineStage], max_norm: float) -> Tensor:
    """Scale the gradients of all stages to a norm of at most `max_norm`.

    Every rank of the mesh calls it with its stages, after the gradients are summed.
    Returns what the norm was: that of the full model, in which tied and mirrored
    parameters, and what several tensor or data ranks hold alike, count once.
    """
    gradients, counts = [], []
    modules = stage_modules(stages)
    for module in modules:
        first = module.data is None or module.data.rank() == 0
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                counts.append(first and module.placement(name).is_first)
    return clip_sharded_grad_norm_(gradients, max_norm, modules[0].all_ranks(), counts)
