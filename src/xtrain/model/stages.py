"""The decoder cut into the virtual stages of a pipeline schedule.

    embedding  layer 0  layer 1 | layer 2  layer 3 | layer 4  layer 5  norm and head
              stage 0                stage 1                   stage 2

Ranks cost about the same FLOPs, over all their stages. A rank makes the modules of its
own stages alone.

Shapes: B batch, S sequence, H hidden, V vocabulary, t tensor ranks, c context ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.agreement import problem_of
from xtrain.comm.autograd import all_reduce_identity, identity_all_reduce
from xtrain.comm.deferred import active_queue
from xtrain.comm.mesh import axis_group
from xtrain.model.balance import (
    adds_losses,
    auxiliary_terms,
    loss_of_terms,
    no_terms,
)
from xtrain.model.checks import check_recompute, check_same_config
from xtrain.model.config import XtrainConfig
from xtrain.model.decoder_parts import DecoderParts
from xtrain.model.decoder_weights import TIED
from xtrain.model.loss import IGNORED, sum_cross_entropy
from xtrain.model.mesh_axes import axis_size, check_mesh
from xtrain.model.overlapped_layers import Pieces, forward_over, layers_before
from xtrain.pipeline_parallel.cut import balanced_cut
from xtrain.pipeline_parallel.stage import PipelineStage
from xtrain.schedules import Schedule
from xtrain.tensor_parallel.shards import check_features, check_ids


class DecoderStage(DecoderParts):
    """The parts of the decoder that one virtual stage holds."""

    def forward(self, x: Tensor, *given: Tensor | None) -> Any:
        """Tokens [B, S] on the first stage, else the output of the stage before.

        Activations [B, S / c, H], or [B, S / c / t, H] with sequence_parallel; logits
        [B, S / c, V / t] from the last stage. Between stages positions, mask and
        documents follow if the first stage got them; and if routers add to the loss,
        what they add, also to the last stage's logits.

        Args:
            given: on the first stage positions, [B, S] or [S], a token mask, [B, S],
                and documents, [B, S], in this order, as `XtrainModel` takes them.

        Raises:
            ValueError: inputs do not fit; before anything is computed.
        """
        return self.checked_run(x, given)

    def checked_run(
        self,
        x: Tensor,
        given: tuple[Tensor | None, ...] = (),
        through: Callable[..., Tensor] | None = None,
    ) -> Any:
        """`run`, after the checks of a call."""
        adds, terms = adds_losses(self.config), None
        if self.has_embedding:
            self.check_call(x, None, *given)
            self.check_same_batch(x, None, *given)
        else:
            check_features(f"decoder parts {self.parts}", x, self.config.hidden_size)
            if adds:
                *given, terms = given  # type: ignore[assignment]
        positions, mask, documents = (*given, None, None, None)[:3]
        last = documents if documents is not None else mask
        if last is not None and positions is None:  # they are told apart by place
            positions = torch.arange(self.whole_length(x), device=x.device)
        if documents is not None and mask is None:
            mask = torch.ones_like(documents, dtype=torch.bool)
        given = positions, mask, documents
        y = self.run(x, positions, through, mask, documents)
        if adds and self.routings():
            context = self.context and self.context.group
            known = self.config, self.routings(), len(x), context, self.data
            own = auxiliary_terms(*known)
            terms = own if terms is None else terms + own
        elif adds and terms is None:
            terms = no_terms(self.config, y)
        passed: tuple[Tensor | None, ...] = () if self.has_head else given
        if self.has_head and self.deals:  # `loss_fn` deals out the labels by them
            one = torch.zeros(len(x), self.whole_length(x), dtype=torch.int64)
            passed = (documents if documents is not None else one,)
        output = [y, *(t for t in (*passed, terms) if t is not None)]
        return tuple(output) if len(output) > 1 else y

    def loss_fn(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of labels other than -100 of this batch, and their count.

        Both are of whole sequences, summed over context ranks. The auxiliary loss is
        that of the micro-batch on all data ranks, and weighs as its labels do.

        Args:
            output: what the last stage returns.
            labels: [B, S], whole as the tokens are.

        Raises:
            ValueError: labels are not ids of the vocabulary, or not of the logits'
                shape.
        """
        logits, *terms = output if isinstance(output, tuple) else (output,)
        rows, length = logits.shape[:-1]
        length *= axis_size(self.mesh, "context")
        if list(labels.shape) != [rows, length]:
            raise ValueError(
                f"labels {list(labels.shape)} for logits {list(logits.shape)}: there "
                "is one label for each token"
            )
        check_ids(labels, self.config.vocab_size, IGNORED)
        self.check_same_batch(None, labels)
        count = (labels != IGNORED).sum()
        group = documents = None
        if self.deals:
            documents, *terms = terms
        if self.context is not None:
            cut = self.context.of_batch(length, documents)
            labels, group = cut.shard(labels), cut.group
        total = sum_cross_entropy(logits, labels, self.tensor)
        if group is not None:
            total = all_reduce_identity(total, group)
        for of_routers in terms:
            added = loss_of_terms(self.config, of_routers, group, self.data)
            if self.data is not None and self.data.size() > 1:
                # each data rank adds it for its own labels; its gradient is for all
                added = identity_all_reduce(added, self.data)
            total = total + count * added
        return total, count


class OverlappedDecoderStage(DecoderStage):
    """A stage with layers whose experts are on several ranks.

    A runner whose schedule has overlapped pairs calls `forward_with_backward` for a
    pair, and `forward_in_pieces` for a forward whose backward may come in one. Called
    as a module it is a `DecoderStage`.
    """

    def forward_in_pieces(self, *inputs: Any) -> Tensor:
        """What the module returns."""
        return self._run_over(iter(()), inputs)

    def forward_with_backward(self, inputs: tuple, backward: Any) -> Tensor:
        """What the module returns for `inputs`; under it, another's backward."""
        layers = layers_before(backward.outputs)
        if layers is None:  # it was run as a whole, and so is its backward
            output = self._run_over(iter(()), inputs)
            backward()
            return output
        rest = layers.backward_to_here(backward.outputs, backward.gradients)
        return self._run_over(rest, inputs)

    def _run_over(self, backwards: Pieces, inputs: tuple) -> Tensor:
        x, *given = inputs
        in_pieces = active_queue() is None  # else its own backward comes as B and W
        over = partial(forward_over, self.layers, backwards, in_pieces)
        return self.checked_run(x, tuple(given), over)


def part_costs(config: XtrainConfig, sequence: int = 1) -> list[int]:
    """FLOPs for `sequence` tokens: of the embedding, of each layer, of norm and head.

    Only matrix products count, so the embedding is free. Of experts those that a token
    visits count, on any rank.
    """
    costs = [
        config.layer_flops_per_token(layer, sequence, causal=True) * sequence
        for layer in range(config.num_hidden_layers)
    ]
    total = config.flops_per_token(sequence, causal=True) * sequence
    return [0, *costs, total - sum(costs)]


def stage_parts(
    config: XtrainConfig,
    stages: int,
    sequence: int = 1,
    ranks: Sequence[int] | None = None,
) -> list[range]:
    """Which parts of the decoder, by number, each of so many stages holds.

    Args:
        ranks: of each stage, if they have several; their sums are to be equal.
    """
    costs = part_costs(config, sequence)
    if stages > len(costs):
        raise ValueError(
            f"{stages} virtual stages of {config.num_hidden_layers} layers: each needs "
            f"a layer, the embedding or the head, so there are at most {len(costs)}"
        )
    return balanced_cut(costs, stages, ranks)


def check_pipeline(
    config: XtrainConfig, mesh: DeviceMesh | None, schedule: Schedule
) -> None:
    """ValueError unless these stages can be on a mesh with the ranks of a schedule."""
    check_ranks(mesh, schedule)
    check_mesh(mesh, config, also=("pipeline",))


def check_ranks(mesh: DeviceMesh | None, schedule: Schedule) -> None:
    """ValueError unless a mesh has the ranks of a schedule."""
    ranks = axis_size(mesh, "pipeline")
    if ranks != schedule.ranks:
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.ranks} ranks, but the mesh's "
            f'axis "pipeline" has {ranks}'
        )


def make_modules(
    config: XtrainConfig,
    mesh: DeviceMesh | None,
    schedule: Schedule,
    sequence: int = 1,
    recompute: str = "none",
    recomputed_layers: int | None = None,
    **options: Any,
) -> dict[int, DecoderStage]:
    """The modules of this rank's stages, by the stage's number; only they are made."""
    cut = {"schedule": schedule.name, "stages": schedule.stages, "sequence": sequence}
    options |= {"recompute": recompute, "recomputed_layers": recomputed_layers}
    problem = problem_of(lambda: check_pipeline(config, mesh, schedule))
    problem = problem or check_recompute(recompute, recomputed_layers, "stage")
    check_same_config(config, mesh, cut | options, problem)
    group = axis_group(mesh, "pipeline")
    rank = 0 if group is None else group.rank()
    parts = stage_parts(config, schedule.stages, sequence, schedule.holders)
    in_pieces = hides_messages(mesh, schedule) and recompute in ("none", "selective")
    whole = options.get("sequence_parallel") or options.get("once_a_rank")
    in_pieces = in_pieces and not whole
    kind = OverlappedDecoderStage if in_pieces else DecoderStage
    found: dict[int, DecoderStage] = {}
    for stage in schedule.stages_of(rank):
        is_copy = schedule.rank_of(stage, 0) != rank
        made = kind(config, mesh, parts[stage], is_copy=is_copy, **options)
        if recomputed_layers is not None:  # those that are left for the next stage
            options["recomputed_layers"] -= min(
                len(made.layers), options["recomputed_layers"]
            )
        found[stage] = made
    return found


def hides_messages(mesh: DeviceMesh | None, schedule: Schedule) -> bool:
    """Whether stages have messages between experts, and a schedule pairs over them."""
    pairs = any(a.under is not None for actions in schedule.actions for a in actions)
    return pairs and axis_size(mesh, "expert") > 1


def as_stages(modules: dict[int, DecoderStage], count: int) -> list[PipelineStage]:
    """The modules as stages; those at both ends share a tied weight."""
    stages = []
    for index, module in modules.items():
        held = dict(module.named_parameters())
        shared = {}
        if module.config.tie_word_embeddings and count > 1 and TIED in held:
            shared = {TIED: held[TIED]}
            if held[TIED].is_meta:
                raise ValueError(
                    f"stage {index} on the meta device shares {TIED}, and would share "
                    "another parameter after to_empty: make it on a device"
                )
        whole = module.recompute == "stage"
        stages.append(
            PipelineStage(module, index, count, shared=shared, recompute=whole)
        )
    return stages
