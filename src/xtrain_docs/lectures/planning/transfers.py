"""What travels in a step by dtype, what hides it, and where other formulas differ."""

from xtrain.plan import (
    DTYPES,
    Layout,
    ModelShape,
    Transfer,
    bytes_sent,
    layer_calls,
    layer_forward_flops,
    traffic_per_step,
)
from xtrain.plan.step_traffic import message_size
from xtrain.plan.transfer import SEND

from ...values import value

DENSE, EXPERTS, LARGE = "llama-3-8b", "mixtral-8x7b", "llama-3-70b"
SEQUENCE, BATCH, RANKS = 8192, 8, 8


@value
def comm_sent(model: str, dtypes: str, layout: Layout) -> float:
    """Bytes of the first pipeline rank in a step."""
    shape = ModelShape.preset(model)
    sent = traffic_per_step(shape, layout, SEQUENCE, dtypes=dtypes)
    return float(sum(transfer.sent for transfer in sent))


@value
def comm_stage_layers(flops: float, bandwidth: float) -> float:
    """Layers that compute forward for as long as their output travels."""
    shape = ModelShape.preset(LARGE)
    size = message_size(shape, Layout(), SEQUENCE, DTYPES["megatron-bf16"])
    sending = Transfer("pipeline", "activations", SEND, size, 2)
    layer = layer_forward_flops(shape, SEQUENCE, 0)[0] * SEQUENCE / flops
    return sending.seconds(0.0, 1 / bandwidth) / layer


@value
def comm_zero3_over_ddp(zero3: str, ddp: str) -> float:
    """Bytes of stage 3 over those of DDP, each with its dtypes."""
    stage3 = comm_sent(DENSE, zero3, Layout(data=RANKS, zero=3))
    return stage3 / comm_sent(DENSE, ddp, Layout(data=RANKS))


@value
def comm_layer_elements(sequence_parallel: bool) -> float:
    """Elements a layer sends over tensor ranks, in bsh (t-1)/t, without norms."""
    shape = ModelShape.preset(DENSE)
    calls = layer_calls(shape, 1, SEQUENCE, RANKS, itemsize=1,
                        sequence_parallel=sequence_parallel)  # fmt: skip
    blocks = [call for call in calls if call.part != "norm"]
    return bytes_sent(blocks) / (SEQUENCE * shape.hidden_size) * RANKS / (RANKS - 1)
