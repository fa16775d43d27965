"""Seconds of one micro-batch on a rank: kernels, and the collectives they wait for.

    forward    products + attention + element-wise    or the host's launches, if longer
    backward   products twice, attention's five products, element-wise twice,
               and a forward once more if activations are recomputed

    hidden     the second gather of a sequence-parallel input, behind the product before
               it; ring attention's messages, behind the blocks they are for; DualPipe's
               exchanges, behind the other direction's compute

Sources: Narayanan et al., 2021; Liu et al., Ring Attention, 2023 (blocks hide the
messages for the next ones); DeepSeek-AI, 2024 (pairs that hide an all-to-all).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xtrain.plan.kernels import Kernels
from xtrain.plan.layout import DeviceParameters, Layout
from xtrain.plan.layout_rules import padded_vocabulary
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import edge_transfers, layer_transfers
from xtrain.plan.throughput import layer_forward_flops
from xtrain.plan.transfer import Links, Transfer, TransferDtypes

LAUNCHED = {"dense": 40, "experts": 80, "edge": 20}
"""Kernels of a forward: of a layer, of one with experts, of what is not a layer."""
MERGED = 6
"""Kernels of a hop of ring attention: a block, and what merges it."""
PAIRED = ("dualpipe", "dualpipe_v")


class KernelSeconds(NamedTuple):
    """Seconds of kernels in a forward, without their launches."""

    products: float
    attention: float
    attention_back: float
    passes: float
    host: float
    accumulation: float = 0.0
    """Of the weights' gradients, in backward."""
    again: float = 0.0
    """Products that selective recomputation computes once more."""

    @property
    def forward(self) -> float:
        return max(self.products + self.attention + self.passes, self.host)


class Pass(NamedTuple):
    """Seconds of one micro-batch on a rank (or of one layer)."""

    forward: float
    backward_input: float
    backward_weight: float
    tensor: float
    """How much of them tensor ranks' collectives take; the next two likewise."""
    context: float
    expert: float

    def scaled(self, times: float) -> "Pass":
        return Pass(*(times * value for value in self))

    def plus(self, other: "Pass") -> "Pass":
        return Pass(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def seconds(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


class PassTimes:
    """Of one model on one machine: what layouts share is computed once."""

    def __init__(
        self,
        shape: ModelShape,
        sequence: int,
        kernels: Kernels,
        links: Links,
        dtypes: TransferDtypes,
        tensor_overlap: bool = False,
    ):
        self.shape, self.sequence, self.kernels = shape, sequence, kernels
        self.tensor_overlap = tensor_overlap
        self.links, self.dtypes = links, dtypes
        self.constants = kernels.constants
        self.known: dict[tuple[Any, ...], Pass] = {}

    def of_rank(self, layout: Layout, rank: int, held: DeviceParameters) -> Pass:
        """One micro-batch on a pipeline rank, which holds that."""
        key = ("rank", *cut_of(layout), layout.recomputed_layers, layout.pipeline,
               layout.chunks, layout.schedule, rank)  # fmt: skip
        if key not in self.known:
            total = self.of_edge(layout, rank)
            again = layout.recomputed_share(held.dense_layers + held.moe_layers)
            ways = [(again, layout)]
            if again < 1:
                others = replace(layout, recompute="selective", recomputed_layers=None)
                ways.append((1 - again, others))
            for share, way in ways:
                for moe, count in ((False, held.dense_layers), (True, held.moe_layers)):
                    if count:
                        layers = self.of_layer(way, moe).scaled(share * count)
                        total = total.plus(layers)
            self.known[key] = total
        return self.known[key]

    def of_layer(self, layout: Layout, moe: bool) -> Pass:
        """One layer of one micro-batch."""
        key = ("layer", moe, layout.schedule in PAIRED, *cut_of(layout))
        if key not in self.known:
            transfers = layer_transfers(
                self.shape, layout, self.sequence, self.dtypes, moe
            )
            work = self.layer_work(layout, moe)
            self.known[key] = self.timed(layout, work, transfers, layout.recompute)
        return self.known[key]

    def of_edge(self, layout: Layout, rank: int) -> Pass:
        """Embedding, head and loss of one micro-batch, where the rank has them."""
        stages = layout.stages_of(rank)
        first, last = 0 in stages, layout.stages - 1 in stages
        key = ("edge", first, last, *cut_of(layout))
        if key not in self.known:
            transfers = edge_transfers(
                self.shape, layout, self.sequence, self.dtypes, rank
            )
            work = self.edge_work(layout, first, last)
            self.known[key] = self.timed(layout, work, transfers, "none")
        return self.known[key]

    def layer_work(self, layout: Layout, moe: bool) -> KernelSeconds:
        """Kernels of a layer's forward."""
        shape, kernels, cut = self.shape, self.kernels, layout.tensor
        rows = layout.micro_batch * self.sequence // layout.context
        between = rows / (cut if layout.sequence_parallel else 1)
        matrices: list[tuple[float, float]] = [*shape.attention_products(cut)]
        heads = shape.num_attention_heads / cut
        passed = 10 * between * shape.hidden_size  # two norms, two additions
        passed += 2 * rows * shape.attention_width / cut  # rotary positions
        kinds = LAUNCHED["experts" if moe else "dense"]
        if layout.context_way == "ring":  # each hop's block is merged into fp32 sums
            hops = layout.context - 1
            passed += 4 * hops * rows * heads * shape.head_dim
            kinds += MERGED * hops
        products = weights = 0.0
        if moe:
            products, permuted, weights = self.expert_products(layout, rows)
            passed += permuted
        else:
            inner = shape.intermediate_size / cut
            matrices += shape.mlp_products(inner)
            passed += shape.mlp_matrices * rows * inner
        products += kernels.products(rows, matrices)
        weights += elements(matrices)
        layer = shape.num_hidden_layers - 1 if moe else 0
        flops = layer_forward_flops(shape, self.sequence, layer)[1] * rows / cut
        pairs = rows * heads * (self.sequence + 1) / 2
        return KernelSeconds(
            products,
            kernels.attend(flops, pairs, shape.head_dim),
            kernels.attend(flops, pairs, shape.head_dim, backward=True),
            kernels.passes(passed),
            kernels.host(kinds),
            kernels.accumulation(weights),
            kernels.products(rows, shape.recomputed_products(cut)),
        )

    def expert_products(
        self, layout: Layout, rows: float
    ) -> tuple[float, float, float]:
        """Seconds of router and experts, elements that they pass over, weights."""
        shape, constants = self.shape, self.constants
        cut, hidden = layout.expert_cut, shape.hidden_size
        own = shape.num_local_experts / layout.expert
        copies = rows * shape.num_experts_per_tok * cut / layout.tensor
        busiest = copies * (constants.imbalance if layout.expert > 1 else 1)
        inner = (shape.moe_intermediate_size or 0) / cut
        one = shape.mlp_products(inner)
        each = self.kernels.products(busiest / own, one)
        seconds = own * each / constants.grouped
        weights = own * elements(one)
        shared = shape.n_shared_experts * (shape.moe_intermediate_size or 0)
        if shared:
            wide = shape.mlp_products(shared / layout.tensor)
            seconds += self.kernels.products(rows, wide)
            weights += elements(wide)
        seconds += self.kernels.product(rows, hidden, shape.num_local_experts, True)
        passed = 4 * copies * hidden * constants.permutation
        passed += 3 * busiest * inner + 3 * rows * shared / layout.tensor
        return seconds, passed, weights

    def edge_work(self, layout: Layout, first: bool, last: bool) -> KernelSeconds:
        """Kernels of embedding, head and loss in a forward."""
        shape, kernels = self.shape, self.kernels
        rows = layout.micro_batch * self.sequence // layout.context
        width = padded_vocabulary(shape.vocab_size, layout.tensor) // layout.tensor
        products = passed = 0.0
        if first:
            passed += 2 * rows * shape.hidden_size
        if last:
            products = kernels.product(rows, shape.hidden_size, width, half=True)
            passed += 6 * rows * width  # logits and their fp32 copy, read and written
        host = kernels.host(LAUNCHED["edge"]) if first or last else 0.0
        held = (first + last) * width * shape.hidden_size
        added = kernels.accumulation(held)
        return KernelSeconds(products, 0.0, 0.0, kernels.passes(passed), host, added)

    def timed(
        self,
        layout: Layout,
        work: KernelSeconds,
        transfers: list[Transfer],
        recompute: str,
    ) -> Pass:
        """Kernels and the collectives that they wait for."""
        again = twice = 0.0  # of a forward, and of its attention
        if recompute == "full":
            again, twice = work.forward, work.attention
        if recompute == "selective":
            if self.kernels.attention == "unfused":
                again = twice = work.attention
            else:
                again = work.passes + work.again
        back = work.products + work.attention_back + 2 * work.passes
        back = max(back, 2 * work.host - work.products) + again
        added = work.products + work.accumulation  # the weights' part of backward
        ring = (  # the blocks, and what the host adds to them
            work.forward - work.products - work.passes,
            back - work.products - 2 * work.passes - again + twice,
        )
        computed = work.forward + back + work.products
        beside = max(work.products, work.host)
        waits = self.waits(layout, transfers, beside, ring, computed)
        forward, backward = (sum(way) for way in zip(*waits.values(), strict=True))
        return Pass(
            work.forward + forward,
            back + backward,
            added,
            *(sum(waits[axis]) for axis in ("tensor", "context", "expert")),
        )

    def waits(
        self,
        layout: Layout,
        transfers: list[Transfer],
        beside: float,
        ring: tuple[float, float],
        computed: float,
    ) -> dict[str, tuple[float, float]]:
        """Seconds of messages by axis: forward, and backward beyond its products."""
        exposed = {axis: [0.0, 0.0] for axis in ("tensor", "context", "expert")}
        hidden = 0.0
        for transfer in transfers:
            seconds = self.links.seconds(layout, transfer)
            if transfer.overlapped and transfer.axis == "tensor":
                hidden += seconds
            else:
                exposed[transfer.axis][transfer.backward] += seconds
        exposed["tensor"][1] += max(0.0, hidden - beside)
        if self.tensor_overlap:  # in pieces, each behind a piece of its product
            pieces, tensor = self.constants.pieces, exposed["tensor"]
            times = (1, 2)
            exposed["tensor"] = [
                sent - min(pieces * sent, time * beside)
                for sent, time in zip(tensor, times, strict=True)
            ]
        context = exposed["context"]
        if layout.context_way == "ring":  # a block is computed as the next one comes
            slowed = self.constants.interference
            context = [
                max(slowed * sent, sent - max(block, 0.0))
                for sent, block in zip(context, ring, strict=True)
            ]
        expert = exposed["expert"]
        share, sent = self.constants.expert_waits, expert[0] + expert[1]
        if layout.schedule in PAIRED and sent:
            share = max(0.0, 1 - computed / sent)
        expert = [share * way for way in expert]
        ways = (exposed["tensor"], context, expert)
        return {name: (way[0], way[1]) for name, way in zip(exposed, ways, strict=True)}


def elements(matrices: Sequence[tuple[float, float]]) -> float:
    """Of these matrices together."""
    return sum(inner * outer for inner, outer in matrices)


def cut_of(layout: Layout) -> tuple[Any, ...]:
    """What decides about one layer and one micro-batch."""
    return (layout.tensor, layout.context, layout.expert, layout.micro_batch,
            layout.sequence_parallel, layout.recompute, layout.context_way,
            layout.expert_cut)  # fmt: skip
