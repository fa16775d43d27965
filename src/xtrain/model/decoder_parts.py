"""Consecutive parts of the decoder: the whole of it, or what one stage holds.

    number     0          1        2       ...   L          L + 1
               embedding, layer 0, layer 1, ..., layer L-1, norm and head

    parts of a stage           range(2, 4): layers 1 and 2, nothing else is allocated
    parts of the whole model   range(0, L + 2)

Parameters have the names of the whole model: see `decoder_weights`.

Shapes: B batch, S sequence, H hidden, V vocabulary, t tensor ranks, c context ranks.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.comm.autograd import check_divides
from xtrain.comm.debug_checks import check_same_values
from xtrain.comm.mesh import axis_group, replica_group
from xtrain.expert_parallel import MoE, Routing
from xtrain.model.balance import CopyCounts
from xtrain.model.checks import check_inputs
from xtrain.model.config import XtrainConfig
from xtrain.model.context import BY_DOCUMENT, sequence_cut
from xtrain.model.decoder_weights import DecoderWeights
from xtrain.model.loss import IGNORED
from xtrain.model.mesh_axes import axis_size, batch_group, groups_to_all, mesh_group
from xtrain.model.modules import PlainModules, TensorParallelModules
from xtrain.pipeline_parallel.recompute import checkpoint
from xtrain.tensor_parallel.shards import check_ids

Carried = Mapping[str, dict[str, Any]]
"""Entries of a checkpoint's files that nothing here reads, by the file's name."""


class DecoderParts(DecoderWeights):
    """The parts of the decoder with these numbers.

    Args:
        parts: their numbers, as above.
        is_copy: another rank holds the same parts, and counts in norms and checkpoints.
    """

    carried: Carried = MappingProxyType({})

    def __init__(
        self,
        config: XtrainConfig,
        mesh: DeviceMesh | None,
        parts: range,
        *,
        is_copy: bool = False,
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
        super().__init__()
        self.config, self.mesh, self.parts, self.is_copy = config, mesh, parts, is_copy
        self.sequence_parallel = sequence_parallel
        self.copies = CopyCounts(config)
        self.tensor, self.expert = (
            axis_group(mesh, axis) if axis_size(mesh, axis) > 1 else None
            for axis in ("tensor", "expert")
        )
        self.data, self.replicas = batch_group(mesh), replica_group(mesh)
        self.everyone = groups_to_all(mesh)
        self.context = sequence_cut(
            config, mesh, attention, context_attention, context_balance
        )
        if self.context is not None:
            attention = self.context.attend
        self.deals = self.context is not None and self.context.balance == BY_DOCUMENT
        self.recompute, self.recomputed_layers = recompute, recomputed_layers
        make = PlainModules(config, attention, self.expert)
        if self.tensor is not None:
            cut = sequence_parallel, self.tensor, self.expert
            make = TensorParallelModules(config, attention, *cut)
        make.once_a_rank = once_a_rank
        if self.context is not None:
            make.context = self.context.group.size()
        last = config.num_hidden_layers + 1
        self.has_embedding, self.has_head = 0 in parts, last in parts
        with torch.device("meta"):  # filled below, each weight once
            if self.has_embedding or (self.has_head and config.tie_word_embeddings):
                self.embed_tokens = make.embedding()
            self.layers = nn.ModuleList()
            for number in parts:
                if 0 < number < last:  # named by its number in the whole model
                    again = self.recomputes(len(self.layers))
                    make.recomputes_attention = again == "selective"
                    layer = make.layer(number - 1)
                    self.layers.add_module(str(number - 1), layer)
            if self.has_head:
                self.norm, self.lm_head = make.norm(), make.head()
        self.to(dtype or torch.get_default_dtype())
        self._tie_and_mark()
        device = torch.device(device or torch.get_default_device())
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    def run(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        through: Callable[..., Tensor] | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, S] or activations [B, S / c, H] through these parts, to
        activations or logits [B, S / c, V / t]; with sequence_parallel activations are
        [B, S / c / t, H]. Tokens, positions, mask and documents are those of whole
        sequences.

        Args:
            through: what runs the layers, if not one after the other.
            mask: [B, S], False for padding.
            documents: [B, S], the number of each token's document.
        """
        length = self.whole_length(x)
        if positions is None:
            positions = torch.arange(length, device=x.device)
        limits: Any = documents
        if self.context is not None:
            cut = self.context.of_batch(length, documents)
            positions = cut.shard(positions, -1)
            x = cut.shard(x) if self.has_embedding else x
            mask = None if mask is None else cut.shard(mask)
            if self.deals or documents is not None or self.config.sliding_window:
                limits = cut.plan(length, documents)
        if self.has_embedding:
            x = self.embed_tokens(x)
        more = [mask, limits]
        while more and more[-1] is None:  # what is not given is not passed on
            more.pop()
        x = (through or self.through_layers)(x, positions, *more)
        if self.config.balance_bias:
            self.copies.count(self.routings())
        return self.without_padding(self.lm_head(self.norm(x))) if self.has_head else x

    def through_layers(self, x: Tensor, *more: Tensor | None) -> Tensor:
        """One layer after the other."""
        for place, layer in enumerate(self.layers):
            if self.recomputes(place) == "layer":
                x = checkpoint(layer, x, *more)
            else:
                x = layer(x, *more)
        return x

    def recomputes(self, place: int) -> str:
        """What backward computes again of a layer: of the first ones, or all, the whole
        layer; of the others what is cheap."""
        some = self.recomputed_layers
        return self.recompute if some is None or place < some else "selective"

    def without_padding(self, logits: Tensor) -> Tensor:
        """-inf for rows of the vocabulary that are no token: no loss, no gradient."""
        vocabulary, columns = self.config.vocab_size, logits.shape[-1]
        if self.config.vocab_rows == vocabulary:
            return logits
        first = 0 if self.tensor is None else self.tensor.rank() * columns
        ids = torch.arange(first, first + columns, device=logits.device)
        return logits.masked_fill(ids >= vocabulary, float("-inf"))

    def routings(self) -> dict[int, Routing]:
        """The routing of each router of these layers in its last forward."""
        found = {}
        for name, layer in self.layers.named_children():
            for part in layer.modules():  # a wrapper may be around the layer
                if isinstance(part, MoE) and part.router.stats is not None:
                    found[int(name)] = part.router.stats.routing
        return found

    def whole_length(self, x: Tensor) -> int:
        """The length of the whole sequences, of which `run` gets `x`."""
        length = x.shape[1]
        if not self.has_embedding:
            length *= axis_size(self.mesh, "context")
            if self.sequence_parallel:
                length *= axis_size(self.mesh, "tensor")
        return length

    def check_call(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        token_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> None:
        """ValueError unless this rank's batch fits the model."""
        check_inputs(tokens, labels, positions, token_mask, documents)
        cuts = axis_size(self.mesh, "tensor") if self.sequence_parallel else 1
        if self.context is not None:
            self.context.check_sequence(tokens.shape[1], cuts)
        else:
            check_divides("sequence", tokens.shape[1], cuts)
        check_ids(tokens, self.config.vocab_size)
        if labels is not None:
            check_ids(labels, self.config.vocab_size, IGNORED)

    def check_same_batch(self, *batch: Tensor | None) -> None:
        """Under `debug_checks`: ValueError unless tensor and context ranks, which
        bring the same batch, have the same elements."""
        groups = [self.tensor, self.context and self.context.group]
        axes = [group for group in groups if group is not None]
        names = "tokens", "labels", "positions", "token_mask", "documents"
        given = dict(zip(names, batch, strict=False))
        check_same_values("batches", axes, given)

    def all_ranks(self) -> ProcessGroup | None:
        """The group of all ranks of the mesh: they save, load and clip together."""
        return mesh_group(self.mesh)
