"""A Llama-style decoder, whole on one device or cut over the ranks of a mesh.

    tokens [B, S] -> embedding -> layers x (attention, SwiGLU) -> norm -> head -> logits

Each half of a layer has a norm before it and a residual around it. Modules are named
as in Hugging Face's Llama, so that its checkpoints map one to one. A layer may have
experts in place of its SwiGLU, `xtrain.expert_parallel`. The only buffers are biases of
their routers, with `balance_bias`.

On a mesh with a "tensor" axis the modules are those of `xtrain.tensor_parallel`; on one
with a "context" axis each rank has a part of every sequence, and attention is one of
`xtrain.context_parallel`; on one with a "data" axis each data rank brings its own
batch, and the loss is the mean over all of them. With experts the data axis is written
as two, ("expert_data", "expert"): each rank brings its own batch, and the ranks of
"expert" have different experts.

Sources: Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023;
Jiang et al., Mixtral of Experts, 2024.

Shapes: B batch, S sequence, H hidden, V vocabulary, t tensor ranks, c context ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.agreement import problem_of
from xtrain.comm.autograd import all_gather_split
from xtrain.model.balance import auxiliary_loss, update_biases
from xtrain.model.checks import check_recompute, check_same_config
from xtrain.model.config import XtrainConfig
from xtrain.model.decoder_parts import DecoderParts
from xtrain.model.gradient_sums import check_not_sharded
from xtrain.model.loss import count_labels, mean_cross_entropy, sum_unless
from xtrain.model.mesh_axes import axis_size, check_mesh, is_first
from xtrain.model.stages import as_stages, make_modules
from xtrain.pipeline_parallel import PipelineStage
from xtrain.schedules import Schedule
from xtrain.zero.clip import clip_sharded_grad_norm_


class XtrainModel(DecoderParts):
    """The whole decoder: embedding, layers, norm and head.

    On the meta device it takes no memory; `to_empty` and then `reset_parameters` (or a
    checkpoint) fill it with the same weights as a direct start.

    Args:
        mesh: axes "data" (or "expert_data" and "expert"), "context" and "tensor", any
            of them. Every rank of a context and tensor group passes the same whole
            tokens and labels.
        attention: the function that each layer calls.
        sequence_parallel: keep activations between the layers' matrices cut along the
            sequence over the tensor ranks, whose number must divide its length.
        context_attention: how layers attend over the context ranks' tokens: "ring",
            "all_gather", or "ulysses", which cuts heads instead.
        context_balance: which tokens a context rank has: "none", "striped", "zigzag",
            or "documents", which deals out each document of a batch; "zigzag" unless
            given, but "none" with ulysses.
        recompute: what backward computes again instead of keeping it: "none", "layer"
            (each layer, of which its input is kept), or "selective" (attention between
            its projections, of which queries, keys and values are kept).
        recomputed_layers: of recompute="layer", only so many layers, the first ones;
            the others are "selective". Of stages it counts the layers of a rank.
        once_a_rank: send a token once to each expert rank that it has experts on, not
            once to each expert.

    Raises:
        ValueError: on every rank of the mesh: the mesh or a size does not fit, or ranks
            have different configs or options.
    """

    def __init__(
        self,
        config: XtrainConfig,
        mesh: DeviceMesh | None = None,
        *,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        sequence_parallel: bool = False,
        context_attention: str = "ring",
        context_balance: str | None = None,
        recompute: str = "none",
        recomputed_layers: int | None = None,
        once_a_rank: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        given: dict[str, Any] = {
            "attention": attention,
            "sequence_parallel": sequence_parallel,
            "context_attention": context_attention,
            "context_balance": context_balance,
            "recompute": recompute,
            "recomputed_layers": recomputed_layers,
            "once_a_rank": once_a_rank,
            "dtype": dtype,
        }
        problem = problem_of(lambda: check_mesh(mesh, config))
        problem = problem or check_recompute(recompute, recomputed_layers)
        check_same_config(config, mesh, given, problem)
        super().__init__(
            config,
            mesh,
            range(config.num_hidden_layers + 2),
            device=device,
            **given,
        )

    @staticmethod
    def stages(
        config: XtrainConfig,
        mesh: DeviceMesh | None,
        schedule: Schedule,
        *,
        sequence: int = 1,
        **options: Any,
    ) -> list[PipelineStage]:
        """This rank's virtual stages of the model, in the order of the schedule.

        Only what they hold is allocated. The model is cut by FLOPs. Hand the last
        stage's `module.loss_fn` to the runner.

        Args:
            mesh: its axis "pipeline" has as many ranks as the schedule; it may have all
                other axes besides. A runner's `data_group` is `batch_group(mesh)`.
            sequence: the length for which the layers are to cost the same. Attention's
                share grows with it; for 1 only the matrices count.
            options: of an `XtrainModel`. With recompute="stage" backward computes a
                whole stage again, of which its input alone is kept.

        Raises:
            ValueError: mesh and schedule do not fit, or there are more virtual stages
                than layers, embedding and head.
        """
        modules = make_modules(config, mesh, schedule, sequence, **options)
        return as_stages(modules, schedule.stages)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        documents: Tensor | None = None,
        gather_logits: bool = False,
    ) -> Tensor:
        """Logits [B, S, V], or the mean loss over labels other than -100.

        Auxiliary losses of routers are added as their coefficients in the config say:
        see `auxiliary_loss`.

        On tensor and context ranks the logits are this rank's columns of the vocabulary
        for its own tokens, [B, S / c, V / t]. Rows that pad the vocabulary have -inf.
        The loss is the same on every rank of the
        mesh.

        Args:
            tokens: ids, [B, S].
            labels: [B, S], each the token that should follow; the caller shifts them.
            positions: [S] or [B, S]; 0, 1, 2, ... unless given.
            token_mask: [B, S], bool, False for padding: routers send it to no expert,
                and neither loads nor auxiliary losses count it. Its labels are to be
                -100. Causal attention hides padding on the right from all tokens
                before it.
            documents: [B, S], whole numbers: a token sees those of its own document. A
                negative number is padding, which sees nothing and is never seen.
            gather_logits: return the whole vocabulary's for all tokens, in their order,
                on every rank.

        Raises:
            ValueError: what is given does not fit; before anything is computed, on
                every rank that takes part in the call.
        """
        batch = tokens, labels, positions, token_mask, documents
        problem = problem_of(lambda: self.check_call(*batch))
        self.check_same_batch(*batch)
        if labels is not None:
            count = count_labels(labels, self.data, problem, self.everyone)
        else:
            sum_unless(problem, None, self._called_together())
        logits_BSV = self.run(tokens, positions, None, token_mask, documents)
        cut = self.context and self.context.of_batch(tokens.shape[1], documents)
        if labels is not None:
            labels = labels if cut is None else cut.shard(labels)
            ranks = self.tensor, self.data, count, cut and cut.group
            loss = mean_cross_entropy(logits_BSV, labels, *ranks)
            routings, others = self.routings(), (cut and cut.group, self.data)
            return loss + auxiliary_loss(
                self.config, routings, *others, sequences=len(tokens)
            )
        if gather_logits and self.tensor is not None:
            logits_BSV = all_gather_split(logits_BSV, -1, self.tensor)
        if gather_logits and cut is not None:
            logits_BSV = cut.unshard(logits_BSV)
        if gather_logits:
            logits_BSV = logits_BSV[..., : self.config.vocab_size]
        return logits_BSV

    def _called_together(self) -> list[ProcessGroup]:
        """The axes whose ranks all take part in a call, with labels or without."""
        groups = self.tensor, self.expert, self.context and self.context.group
        return [group for group in groups if group is not None and group.size() > 1]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; what it was before.

        After `sync_gradients`, on every rank. The norm is that of the full model: each
        slice counts once, and what several ranks hold counts once.

        Raises:
            ValueError: inside ZeRO or FSDP, which shard gradients: call their method.
        """
        check_not_sharded(self.parameters())
        held = [(n, p.grad) for n, p in self.named_parameters() if p.grad is not None]
        gradients = [gradient for _, gradient in held]
        if axis_size(self.mesh, "expert") > 1:
            first = is_first(self.replicas)
            counts = [first and self.placement(name).is_first for name, _ in held]
            return clip_sharded_grad_norm_(
                gradients, max_norm, self.all_ranks(), counts
            )
        if self.tensor is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        counts = [self.slice_of(name).is_first for name, _ in held]
        return clip_sharded_grad_norm_(gradients, max_norm, self.tensor, counts)

    def update_balance_biases(self, rate: float = 1e-3) -> None:
        """After a step: move the routers' biases towards equal loads of the experts.

        Every rank calls it. The loads are those of all tokens, on all ranks, that were
        trained on since the last call.
        """
        update_biases([self], rate)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The call with labels: `self(...)`, so that hooks of wrappers run."""
        return self(tokens, labels)
