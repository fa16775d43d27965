"""ZeRO 3, also known as FSDP: every rank owns 1/N of everything.

    forward    gather block 0 | compute 0 | free 0
                    gather block 1 ....... | compute 1 | free 1
    backward                                  gather 1 | compute 1 | free 1, reduce 1
                                                  gather 0 ....... | compute 0 | ...

Weights exist in full for one block at a time, plus the next one, which is gathered
while this one computes. Gradients are reduce-scattered as each block's backward ends.
So a step sends three times (N-1)/N of the parameters, all-gather, all-gather,
reduce-scatter, where plain data parallelism sends two; and memory is 16/N bytes per
parameter with Adam.

With `reshard_after_forward=False` weights stay between forward and backward: two thirds
of the traffic, for the memory of the full weights.

Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.agreement import (
    as_text,
    check_options,
    check_same,
    check_unwrapped,
    claim,
    problem_of,
    raising_everywhere,
)
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives
from xtrain.zero import resume
from xtrain.zero.blocks import Block, find_blocks, materialise_buffers, nearest_block
from xtrain.zero.checkpoint import (
    CheckpointError,
    Piece,
    check_safetensors,
    read_safetensors,
)
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.shards import Reduction, Shards, Site
from xtrain.zero.structures import cast, tensors_of


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks.

    Build the optimizer over `parameters()` afterwards: they are the local pieces, views
    of flat shards, some of them empty. Names stay those of the bare module.

    A module that was built on torch's meta device takes no memory: its shards begin as
    zeros, to be filled by `load_full` or `load_sharded`. Activation checkpointing works
    with `use_reentrant=False`. A block's output is a tensor, or tensors in lists,
    tuples, dictionaries and dataclasses.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all.
        compute_dtype: of gathered weights, of the computation and of the gradients on
            their way; shards and their gradients keep the parameters' dtype.
        reshard_after_forward: free weights after forward and gather them again in
            backward; the root block's stay in either case.
        blocks: module classes, or names of modules, that are gathered one by one; the
            children of every ModuleList unless given. The rest is the root block.
        gradient_reduction: "average" (as torch does) or "sum".
        collectives: TORCH, RING or DIRECT; what suits the backend unless given, see
            `xtrain.comm.collective_choice`.

    All ranks must give the same.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        blocks: Iterable[type[nn.Module] | str] | None = None,
        gradient_reduction: str = "average",
        collectives: Collectives | None = None,
    ):
        super().__init__()
        blocks = None if blocks is None else list(blocks)
        chosen: list[nn.Module] = []
        problem = problem_of(
            lambda: check_options(gradient_reduction),
            lambda: check_compute_dtype(compute_dtype),
            lambda: check_unwrapped(module, "FullyShardedDataParallel"),
            lambda: chosen.extend(find_blocks(module, blocks)),
            lambda: materialise_buffers(module, process_group),
        )
        named = [*module.named_parameters(), *module.named_buffers()]
        options = {
            "compute_dtype": compute_dtype,
            "reshard_after_forward": reshard_after_forward,
            "blocks": blocks and sorted(map(as_text, blocks)),
            "gradient_reduction": gradient_reduction,
            "collectives": collectives and collectives.name,
        }
        check_same("parameters", named, process_group, options, problem)
        self.module, self.process_group = module, process_group
        self.rank, self.size = rank_and_size(process_group)
        self.reshard_after_forward = reshard_after_forward
        self.compute_dtype = compute_dtype
        self._options = (collectives, gradient_reduction == "average")
        aliases: dict[nn.Parameter, set[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, set()).add(name)
        self._aliases = {name: names for names in aliases.values() for name in names}
        self.blocks = self._shard(module, chosen)
        claim(self.parameters(), "FullyShardedDataParallel")
        for buffer in module.buffers():
            dist.broadcast(buffer.detach(), group=process_group, group_src=0)

        self._order: list[Block] = []  # as forward met them, without the root
        self._met: list[Block] = []
        self._reducing: list[Reduction] = []
        self._backward = -1  # autograd's number for the backward under way
        for block in self.blocks[1:]:
            block.module.register_forward_pre_hook(
                lambda _, inputs, block=block: self._before_forward(block, inputs)
            )
            block.module.register_forward_hook(
                lambda _, __, output, block=block: self._after_forward(block, output),
                always_call=True,
            )
        for block in self.blocks:
            for shards in block.shards:
                shards.on_gradients = partial(self._reduce, block, shards)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root = self.blocks[0]
        if not in_backward():
            self._met = []
            for block in self.blocks:  # a forward without backward left them full
                block.free()
        root.finish_gather()
        root.install()
        if self.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self.compute_dtype)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            root.uninstall()
            raise
        if not in_backward():
            self._order = self._met
        if not torch.is_grad_enabled():
            root.uninstall()
            root.free()
            return output
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(root, 0))
        return output

    # -- around each block

    def _before_forward(self, block: Block, inputs: Any) -> None:
        block.finish_gather()
        if in_backward():  # activation checkpointing computes the block once more
            block.install()
            return
        block.calls += torch.is_grad_enabled()
        block.install()
        if not block.trainable:
            self._watch_inputs(block, block.calls, inputs)
        self._met.append(block)
        following = len(self._met)  # prefetch by the order of the forward before
        if following < len(self._order) and self._order[following - 1] is block:
            self._order[following].start_gather()

    def _after_forward(self, block: Block, output: Any) -> None:
        block.uninstall()
        if in_backward():
            if not block.open:  # its own backward comes later, and gathers again
                block.free()
            return
        if self.reshard_after_forward or not torch.is_grad_enabled():
            block.free()
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda _, call=block.calls: self._before_backward(block, call)
                    )

    def _watch_inputs(self, block: Block, call: int, inputs: Any) -> None:
        """A frozen block has no gradients to tell that its backward is over."""
        entries = [t for t in tensors_of(inputs) if t.requires_grad]
        if torch.is_grad_enabled() and len(entries) == 1:
            for shards in block.shards:
                entries[0].register_hook(
                    lambda _, shards=shards: block.leave_backward(call, shards)
                )

    def _before_backward(self, block: Block, call: int) -> None:
        self._watch_backward()
        block.finish_gather()
        if block is self.blocks[0]:
            return
        block.enter_backward(call)
        position = next((i for i, b in enumerate(self._order) if b is block), 0)
        if position > 0:
            self._order[position - 1].start_gather()

    def _watch_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            self._backward = backward
            self._reducing.clear()  # of a backward that failed
            for block in self.blocks:
                block.open.clear()
            Variable._execution_engine.queue_callback(self._finish_backward)

    def _reduce(
        self,
        block: Block,
        shards: Shards,
        call: int,
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        """All gradients of a block are there: its weights are free to go."""
        self._watch_backward()
        if block is not self.blocks[0]:  # the root's are needed to the end
            block.leave_backward(call, shards)
        self._reducing.append(shards.start_reduce(gradients))
        while len(self._reducing) > 1:  # one on its way, so gradients do not pile up
            self._reducing.pop(0).finish()

    def _finish_backward(self) -> None:
        """The end of backward: gradients are ready, nothing is full any more."""
        self._backward = -1
        while self._reducing:
            self._reducing.pop(0).finish()
        self.blocks[0].uninstall()
        for block in self.blocks:
            block.open.clear()
            block.free()

    # -- building

    def _shard(self, root: nn.Module, chosen: list[nn.Module]) -> list[Block]:
        """Assign every parameter to the innermost block that holds all its places."""
        sites: dict[nn.Parameter, list[Site]] = {}
        owner: dict[nn.Parameter, nn.Module] = {}
        block_of = nearest_block(root, chosen)
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                sites.setdefault(parameter, []).append((module, name))
                here = block_of[module]
                if owner.setdefault(parameter, here) is not here:
                    owner[parameter] = root  # tied across blocks
        names = {p: name for name, p in root.named_parameters()}
        collectives, average = self._options
        blocks = []
        for module in [root, *chosen]:
            kinds: dict[object, dict[nn.Parameter, list[Site]]] = {}
            for parameter, places in sites.items():
                if owner[parameter] is module:
                    kind = (parameter.dtype, parameter.requires_grad)
                    kinds.setdefault(kind, {})[parameter] = places
            shards = [
                Shards(
                    members,
                    names,
                    self.process_group,
                    self.rank,
                    self.size,
                    self.compute_dtype,
                    collectives,
                    average,
                )
                for members in kinds.values()
            ]
            blocks.append(Block(module, shards))
        return blocks

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's pieces of the parameters, flat, and the buffers.

        Under the bare module's names, as `named_parameters`. Only the same rank of as
        many ranks can load it: `full_state_dict` gives whole tensors, `save_sharded`
        writes what any number of ranks can load.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` gave on this rank."""
        return self.module.load_state_dict(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before clipping.
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return clip_sharded_grad_norm_(grads, max_norm, self.process_group)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the bare module's `state_dict`, whole, on every rank."""
        whole: dict[Site, Tensor] = {}
        for block in self.blocks:
            for shards in block.shards:
                flat = shards.shard.new_empty(shards.layout.padded_numel)
                shards.collectives.all_gather(
                    flat, shards.shard, group=self.process_group
                ).wait()
                views = shards.layout.views(flat)
                for view, places in zip(views, shards.sites, strict=True):
                    tensor = view.clone()
                    whole.update(dict.fromkeys(places, tensor))
        names = {m: prefix for prefix, m in self.module.named_modules()}
        state = self.module.state_dict()
        for (module, name), tensor in whole.items():
            prefix = names[module]
            state[f"{prefix}.{name}" if prefix else name] = tensor
        return state

    def save_sharded(
        self,
        directory: str | Path,
        step: int,
        optimizer: Optimizer | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, every rank its pieces; see `xtrain.zero.checkpoint`."""
        places, states = self._places(), resume.States()
        if optimizer is not None:
            states = {piece: optimizer.state.get(piece, {}) for piece in places}
        return resume.save(
            directory,
            step,
            places,
            resume.persistent_buffers(self.module),
            states,
            optimizer,
            extra,
            self.process_group,
        )

    def load_sharded(
        self, path: str | Path, optimizer: Optimizer | None = None
    ) -> tuple[int, dict[str, Any] | None]:
        """Read a checkpoint of any stage and world size, or a run's latest.

        Returns its step and extra. CheckpointError on every rank if it does not fit,
        CheckpointReplaced if it vanished meanwhile and another load may work.
        """
        places = self._places()

        def make_states(saved: resume.Saved) -> resume.States:
            assert optimizer is not None
            on_device = resume.wants_numbers_on_device(optimizer)
            for piece, (name, _, _) in places.items():
                kinds = saved.get(name, {})
                optimizer.state[piece] = resume.empty_state(piece, kinds, on_device)
                if not kinds:
                    del optimizer.state[piece]
            return optimizer.state

        buffers = resume.persistent_buffers(self.module)
        group = self.process_group
        return resume.load(path, places, buffers, make_states, optimizer, group)

    def load_full(self, path: str | Path) -> None:
        """Read a bare model's safetensors file, each rank only its own ranges.

        Names and shapes must fit. Floating-point weights are converted to the model's
        dtype, rounded to the nearest; any other difference of dtype is refused. Of tied
        weights that the file has under several names, the first by name is read.
        CheckpointError on every rank if the file is wrong on one; as far as names,
        shapes and dtypes tell, nothing has changed then.
        """
        wanted = []
        for tensor, place in self._places().items():
            wanted.append(
                (Piece(*place, data=tensor.detach()), self._aliases[place[0]])
            )
        buffers = resume.persistent_buffers(self.module)
        for name, buffer in buffers.items():
            data = torch.empty_like(buffer).reshape(-1)
            wanted.append((Piece(name, tuple(buffer.shape), 0, data), {name}))
        with raising_everywhere(CheckpointError, group=self.process_group):
            check_safetensors(path, wanted)
        with raising_everywhere(CheckpointError, group=self.process_group):
            read_safetensors(path, wanted)
        for piece, _ in wanted:
            if piece.name in buffers:
                buffers[piece.name].copy_(piece.data.view(piece.shape))

    def _places(self) -> dict[Tensor, resume.Place]:
        """Every local piece with the name, shape and first element of its parameter."""
        places: dict[Tensor, resume.Place] = {}
        for shards in (shards for block in self.blocks for shards in block.shards):
            layout = shards.layout
            for piece, slot, name in zip(
                shards.pieces, layout.slots, shards.names, strict=True
            ):
                start, _ = layout.piece_bounds(slot, shards.rank)
                places[piece] = (name, tuple(slot.shape), start)
        return places


def check_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"compute_dtype={dtype} is no floating-point dtype")


def in_backward() -> bool:
    """Whether this code runs inside `backward()`."""
    return torch._C._current_graph_task_id() >= 0
