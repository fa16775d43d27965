"""Seconds of one micro-batch on a rank: products, and the collectives they wait for.

    forward    F             products / rate, and what is not hidden of its messages
    backward   2F, and F     as much again for inputs and for weights, and F once more
               once more     if activations are recomputed

    hidden     the second gather of a sequence-parallel input, behind the product before
               it; ring attention's messages, behind the blocks they are for

Sources: Narayanan et al., 2021; Liu et al., Ring Attention, 2023 (blocks hide the
messages for the next ones).
"""

from typing import Any, NamedTuple

from xtrain.plan.layout import DeviceParameters, Layout
from xtrain.plan.shapes import ModelShape
from xtrain.plan.step_traffic import edge_transfers, layer_transfers
from xtrain.plan.throughput import layer_forward_flops
from xtrain.plan.transfer import Links, Transfer, TransferDtypes


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
    """Of one model on one machine: what layouts share is computed once.

    Args:
        rate: FLOPs a second of a device, as reached.
        formula: of the kept activations; "unfused" attention keeps scores, which
            selective recomputation computes once more.
    """

    def __init__(
        self,
        shape: ModelShape,
        sequence: int,
        rate: float,
        links: Links,
        dtypes: TransferDtypes,
        formula: str,
    ):
        self.shape, self.sequence, self.rate = shape, sequence, rate
        self.links, self.dtypes, self.formula = links, dtypes, formula
        self.known: dict[tuple[Any, ...], Pass] = {}

    def of_rank(self, layout: Layout, rank: int, held: DeviceParameters) -> Pass:
        """One micro-batch on a pipeline rank, which holds that."""
        key = ("rank", *cut_of(layout), layout.pipeline, layout.chunks, layout.schedule,
               rank)  # fmt: skip
        if key not in self.known:
            total = self.of_edge(layout, rank)
            for moe, count in ((False, held.dense_layers), (True, held.moe_layers)):
                if count:
                    total = total.plus(self.of_layer(layout, moe).scaled(count))
            self.known[key] = total
        return self.known[key]

    def of_layer(self, layout: Layout, moe: bool) -> Pass:
        """One layer of one micro-batch."""
        key = ("layer", moe, *cut_of(layout))
        if key not in self.known:
            number = self.shape.num_hidden_layers - 1 if moe else 0
            flops = layer_forward_flops(self.shape, self.sequence, number)
            transfers = layer_transfers(
                self.shape, layout, self.sequence, self.dtypes, moe
            )
            self.known[key] = self.timed(layout, flops, transfers, layout.recompute)
        return self.known[key]

    def of_edge(self, layout: Layout, rank: int) -> Pass:
        """Embedding, head and loss of one micro-batch, where the rank has them."""
        stages = layout.stages_of(rank)
        first, last = 0 in stages, layout.stages - 1 in stages
        key = ("edge", first, last, *cut_of(layout))
        if key not in self.known:
            head = 2 * self.shape.vocab_size * self.shape.hidden_size
            flops = head if last else 0
            transfers = edge_transfers(
                self.shape, layout, self.sequence, self.dtypes, rank
            )
            self.known[key] = self.timed(layout, (flops, 0), transfers, "none")
        return self.known[key]

    def timed(
        self,
        layout: Layout,
        flops: tuple[int, int],
        transfers: list[Transfer],
        recompute: str,
    ) -> Pass:
        """Products and the collectives that they wait for.

        `flops` are those of a token's forward: all, and those of attention.
        """
        tokens = layout.micro_batch * self.sequence // layout.context
        products, attention = (
            flop * tokens / layout.tensor / self.rate for flop in flops
        )
        again = products if recompute == "full" else 0.0
        if recompute == "selective" and self.formula == "unfused":
            again = attention
        waits = self.waits(layout, transfers, products)
        if layout.context_way == "ring":  # a block is computed as the next one comes
            forward, backward = waits["context"]
            passes = 2.5 + (recompute == "full")
            waits["context"] = (
                max(0.0, forward - attention),
                max(0.0, backward - passes * attention),
            )
        forward, backward = (sum(way) for way in zip(*waits.values(), strict=True))
        return Pass(
            products + forward,
            products + again + backward,
            products,
            *(sum(waits[axis]) for axis in ("tensor", "context", "expert")),
        )

    def waits(
        self, layout: Layout, transfers: list[Transfer], products: float
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
        exposed["tensor"][1] += max(0.0, hidden - products)
        return {axis: (way[0], way[1]) for axis, way in exposed.items()}


def cut_of(layout: Layout) -> tuple[Any, ...]:
    """What decides about one layer and one micro-batch."""
    return (layout.tensor, layout.context, layout.expert, layout.micro_batch,
            layout.sequence_parallel, layout.recompute, layout.context_way)  # fmt: skip
