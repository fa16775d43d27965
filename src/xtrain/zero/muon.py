"""Muon: momentum, made orthogonal, for the hidden matrices of a model.

    m <- mu m + (1 - mu) g              as torch has it; the scale does not matter
    d  = (1 - mu) g + mu m              Nesterov; without it d = m
    o  = d with all singular values near 1, by five Newton-Schulz steps
    p <- p - lr * decay * p - lr * scale * o

With d = U S V^T, o is about U V^T: every direction moves equally far. A step of
Newton-Schulz, X <- a X + b (X X^T) X + c (X X^T)^2 X, needs matrix products only, and
bfloat16 is enough. But it needs the whole matrix: of a part it makes something else.

On ranks every matrix is dealt to one of them, which computes it for all, as
`muon_ranks` has it: an all-to-all there, one back. Embeddings, heads, norms and biases
are for AdamW. The momentum takes 4 bytes a parameter in fp32, half of Adam's moments.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024;
Liu et al., Muon is Scalable for LLM Training, 2025 (weight decay, match_rms_adamw).
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.agreement import raise_everywhere, raising_everywhere
from xtrain.comm.collective_choice import Collectives
from xtrain.zero.muon_checks import check_alone
from xtrain.zero.muon_layout import (
    MatrixLayout,
    hidden_matrices,
    matrix_layout,
    whole_matrices,
)
from xtrain.zero.muon_ranks import DealtMatrices
from xtrain.zero.muon_routes import Stack
from xtrain.zero.newton_schulz import COEFFICIENTS, move, newton_schulz


class Muon(Optimizer):
    """torch.optim.Muon, also for stacks of matrices [E, rows, columns], and on ranks.

    Give the other parameters to AdamW; `hidden_matrices(module)` tells them apart.
    Alone, it leaves a parameter without a gradient as it is. On ranks a missing
    gradient counts as zero, as in `ZeroOptimizer`; all step together; and the state is
    kept once among them.

    Args:
        params: matrices or groups of them with their own options.
        ns_coefficients: a, b and c of a Newton-Schulz step.
        eps: the smallest norm by which a matrix is divided.
        adjust_lr_fn: "original", sqrt(max(1, rows / columns)), the default; or
            "match_rms_adamw", 0.2 sqrt(max(rows, columns)), for AdamW's learning rate.
        ns_dtype: of Newton-Schulz, and of the messages.
        process_group: ranks that hold these matrices and gradients whole and alike, as
            under DDP, and share the work. None: this process works alone.
        layout: `matrix_layout(module)`, made after the module was wrapped, in place of
            a process_group: for any wrapper or mesh. `ZeroOptimizer` takes it instead.
        bucket_cap_mb: MiB of matrices that travel together; or one of each rank, if
            that is more.
        collectives: TORCH, RING or DIRECT of `xtrain.comm.collective_choice`; what
            suits the backend unless given.

    ValueError if an argument is wrong; on ranks on each of them, also if they differ.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        process_group: ProcessGroup | None = None,
        layout: MatrixLayout | None = None,
        bucket_cap_mb: float = 64.0,
        collectives: Collectives | None = None,
    ):
        self._dealt: DealtMatrices | None = None
        self.ns_dtype = ns_dtype
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        ranks = process_group if layout is None else layout.group
        if layout is None and process_group is None:
            super().__init__(params, defaults)
            check_alone(self.param_groups)
            return
        with raising_everywhere(ValueError, group=ranks):
            super().__init__(params, defaults)
            layout = layout or whole_matrices(self.param_groups, process_group)
        given = layout, self.param_groups, ns_dtype, bucket_cap_mb
        self._dealt = DealtMatrices(*given, collectives)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        gradient_reduction: str | None = None,
        **options: Any,
    ) -> Self:
        """Muon for the hidden matrices of a module: bare, on a mesh, in DDP or FSDP."""
        layout = matrix_layout(module, process_group, gradient_reduction)
        return cls(hidden_matrices(module)[0], layout=layout, **options)

    @property
    def owners(self) -> dict[Stack, int]:
        """Which rank of the group computes which matrices; nothing if it is alone."""
        return {} if self._dealt is None else self._dealt.owners

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError on ranks, to which the matrices are dealt out."""
        if self._dealt is not None:
            raise ValueError("on ranks Muon takes all its groups when it is built")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix; on ranks all of them together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._dealt is not None:
            self._step_on_ranks(self._dealt)
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = self._direction(parameter, group)
                    update = self._orthogonal(direction, group)
                    move(parameter, update, direction.shape, group)
        return loss

    def _step_on_ranks(self, dealt: DealtMatrices) -> None:
        dealt.reduce_gradients()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        directions: dict[str, Tensor] = {}
        group_of: dict[str, dict[str, Any]] = {}
        for parameter, shards in dealt.stepped.items():
            names = {shard.name for shard in shards}
            group_of |= dict.fromkeys(names, groups[parameter])
            if names & dealt.read:
                direction = self._direction(parameter, groups[parameter])
                directions |= dealt.cut(parameter, direction)
            else:
                self.state.pop(parameter, None)  # loaded: another rank's copy is read
        for turn in dealt.rounds:
            whole = dealt.gather(turn, directions)
            for stack, matrices in whole.items():
                whole[stack] = self._orthogonal(matrices, group_of[stack.name])
            for stack, part, update in dealt.scatter(turn, whole):
                move(part, update, stack.box.size, group_of[stack.name])
        dealt.end_step()

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The momentum with this step's gradient, element by element."""
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _orthogonal(self, matrices: Tensor, group: dict[str, Any]) -> Tensor:
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        return newton_schulz(matrices, *options, self.ns_dtype)

    def reduce_gradients(self) -> None:
        """ZeRO-1: leave each gradient's sum on the rank that reads it, None elsewhere.

        `step` calls it. To clip, call it first, then `clip_sharded_grad_norm_` with the
        gradients that are left.
        """
        if self._dealt is not None:
            self._dealt.reduce_gradients()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; on ranks the state of what this one reads.

        Only the same rank of as many can load that; any number can load a checkpoint.
        """
        state = super().state_dict()
        if self._dealt is not None:
            state["ranks"] = (self._dealt.rank, self._dealt.size)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave.

        ValueError on every rank, and nothing has changed, if one has another's.
        """
        if self._dealt is not None:
            found = state_dict.get("ranks", (0, 1))
            mine = self._dealt.rank, self._dealt.size
            problem = f"state of rank {found[0]} of {found[1]}, this is {mine}"
            differs = tuple(found) != mine
            raise_everywhere(
                ValueError, problem if differs else None, self._dealt.group
            )
        super().load_state_dict(state_dict)
