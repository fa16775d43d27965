"""What an estimate assumes, besides the model, the layout and the device."""

from typing import NamedTuple

from xtrain.plan.time_constants import FITTED, TimeConstants


class Assumptions(NamedTuple):
    """Assumptions of an estimate. Each can be measured on a machine."""

    gpus_per_node: int | None = None
    """Devices that the link of a node joins; as the accelerator has it unless given."""
    precision: str = "bf16"
    """Of the layers' products: "bf16", "fp16", "fp8" or "fp4"."""
    attention: str | None = None
    """Of time: "flash" or "unfused"; as `formula` has it unless given."""
    network: float | None = None
    """Bytes a second of one device's adapter; the accelerator's unless given."""
    constants: TimeConstants = FITTED
    recipe: str = "megatron18"
    dtypes: str = "megatron-bf16"
    formula: str = "fused"
    capacity: float | None = None
    """Bytes of a device's memory; the vendor's figure unless given."""
    reserve: float = 4 * 2**30
    """Bytes that should stay free: CUDA context, NCCL's buffers, workspaces."""
    overlap: bool = True
    """Gradients and gathered weights are sent under compute."""
    sharded_pipeline: bool = False
    tensor_overlap: bool = False
    """Tensor ranks send in pieces behind their products (`tp_comm_overlap` of Megatron
    and NeMo, torch's async tensor parallelism)."""
