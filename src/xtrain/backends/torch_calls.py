# mypy: disable-error-code="override,assignment,call-arg,misc"
"""The collectives of a group as torch calls them, each described once.

torch hands every call of a group to methods of its `ProcessGroup`. Here they become

    self._collective(name, opts, result, outputs, inputs, steps=..., what ranks compare)

where `steps(check, *flat tensors)` is one of seven moves of the group's transport:
all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, barrier.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from xtrain.backends.arguments import (
    check_fits,
    check_pieces,
    host_view,
    one_dtype,
    row_sizes,
)
from xtrain.backends.calls import reduce_op, shape_and_dtype, shape_of, shapes_of
from xtrain.backends.operation import Steps
from xtrain.backends.operators import as_operator
from xtrain.backends.works import Finished, Several

COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single",
    "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip


class TorchCalls:
    """The collectives, for a group that has `_rank`, `_size`, `_transport`, and

    `_collective`, which makes a call: see `call_runner.CallRunner.collective`.
    """

    _rank: int
    _size: int
    _transport: Any
    _collective: Callable[..., dist.Work]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        opts = opts or dist.AllreduceOptions()
        op = reduce_op(opts)
        return self._collective(
            "all_reduce", opts, tensors, [tensor], op=op,
            steps=lambda check, flat: self._transport.all_reduce(flat, op, check),
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._one_by_one(self.allreduce, [([t], opts) for t in tensors], tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        root = opts.rootRank
        return self._collective(
            "broadcast", opts, tensors, [tensor], root=root,
            steps=lambda check, flat: self._transport.broadcast(flat, root, check),
        )  # fmt: skip

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        root, op = opts.rootRank, reduce_op(opts)
        return self._collective(
            "reduce", opts, tensors, [tensor], op=op, root=root,
            steps=lambda check, flat: self._transport.reduce(flat, root, op, check),
        )  # fmt: skip

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (outputs_,), (input,) = outputs, inputs
        check_pieces("all_gather", self._rank, self._size, outputs_, input)
        shapes = tuple(shape_and_dtype(t) for t in outputs_)
        return self._collective(
            "all_gather", opts, outputs_, outputs_, [input], detail=shapes,
            steps=lambda check, *flat: self._transport.all_gather(
                list(flat[:-1]), flat[-1], check
            ),
        )  # fmt: skip

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        check_fits("all_gather", self._size, output, input)
        return self._collective(
            "all_gather_single", opts, [output], [output], [input],
            detail=(shape_and_dtype(input), shape_and_dtype(output)),
            steps=lambda check, whole, part: self._transport.all_gather(
                list(whole.view(self._size, -1)), part, check
            ),
        )  # fmt: skip

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        (output,), (inputs_,) = outputs, inputs
        check_pieces("reduce_scatter", self._rank, self._size, inputs_, output)
        op, shapes = reduce_op(opts), tuple(shape_and_dtype(t) for t in inputs_)
        return self._collective(
            "reduce_scatter", opts, outputs, [output], inputs_, op=op, detail=shapes,
            steps=lambda check, out, *flat: self._transport.reduce_scatter(
                out, list(flat), op, check
            ),
        )  # fmt: skip

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> dist.Work:
        check_fits("reduce_scatter", self._size, input, output)
        op = reduce_op(opts)
        return self._collective(
            "reduce_scatter_single", opts, [output], [output], [input], op=op,
            detail=(shape_and_dtype(input), shape_and_dtype(output)),
            steps=lambda check, out, flat: self._transport.reduce_scatter(
                out, list(flat.view(self._size, -1)), op, check
            ),
        )  # fmt: skip

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def sizes(tensors: list[Tensor]) -> list[int]:
            return [tensor.numel() for tensor in tensors]

        return self._collective(
            "all_to_all", opts, outputs, outputs, inputs,
            detail=one_dtype("all_to_all", [*inputs, *outputs]),
            extra_text=lambda: f"sends {sizes(inputs)}, expects {sizes(outputs)}",
            steps=lambda check, *flat: self._transport.all_to_all(
                list(flat[: self._size]), list(flat[self._size :]), check
            ),
        )  # fmt: skip

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        out_sizes = row_sizes(output, output_split_sizes, self._size)
        in_sizes = row_sizes(input, input_split_sizes, self._size)
        return self._collective(
            "all_to_all_single", opts, [output], [output], [input],
            detail=one_dtype("all_to_all_single", [input, output]),
            extra_text=lambda: f"sends {in_sizes}, expects {out_sizes}",
            steps=lambda check, out, flat: self._transport.all_to_all(
                list(out.split(out_sizes)), list(flat.split(in_sizes)), check
            ),
        )  # fmt: skip

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        root, (input,) = opts.rootRank, inputs
        outputs_ = outputs[0] if self._rank == root else []
        nothing = host_view(input).new_empty(0)

        def steps(check: int, *flat: Tensor) -> Steps:
            sent = [nothing] * self._size
            sent[root] = flat[-1]
            received = list(flat[:-1]) or [nothing] * self._size
            return self._transport.all_to_all(received, sent, check)

        return self._collective(
            "gather", opts, outputs_, outputs_, [input], root=root, steps=steps,
            detail=one_dtype("gather", [input, *outputs_]),
            extra_text=lambda: (
                f"sends {shape_of(input)}, expects {shapes_of(outputs_)}"
            ),
        )  # fmt: skip

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> dist.Work:
        root, (output,) = opts.rootRank, outputs
        inputs_ = inputs[0] if self._rank == root else []
        nothing = host_view(output).new_empty(0)

        def steps(check: int, *flat: Tensor) -> Steps:
            received = [nothing] * self._size
            received[root] = flat[0]
            sent = list(flat[1:]) or [nothing] * self._size
            return self._transport.all_to_all(received, sent, check)

        return self._collective(
            "scatter", opts, outputs, [output], inputs_, root=root, steps=steps,
            detail=one_dtype("scatter", [output, *inputs_]),
            extra_text=lambda: (
                f"sends {shapes_of(inputs_)}, expects {shape_of(output)}"
            ),
        )  # fmt: skip

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective(
            "barrier", opts, [], steps=lambda check: self._transport.barrier(check)
        )

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """What rank r gives as its input k is output k in list r."""
        calls = [
            ([list(of_all)], [input], opts)
            for of_all, input in zip(zip(*outputs, strict=True), inputs, strict=True)
        ]
        flat = [tensor for of_one in outputs for tensor in of_one]
        return self._one_by_one(self.allgather, calls, flat)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        calls = [(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._one_by_one(self.all_gather_single, calls, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        calls = [(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._one_by_one(self.reduce_scatter_single, calls, outputs)

    # torch before 2.13 calls them by these names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _one_by_one(
        self, method: Callable[..., dist.Work], calls: list[tuple], result: list[Tensor]
    ) -> dist.Work:
        works = [method(*arguments) for arguments in calls]
        if any(not work.is_completed() for work in works):
            return Several(works, result)
        return Finished(result)


for _name in COLLECTIVES:
    setattr(TorchCalls, _name, as_operator(_name, getattr(TorchCalls, _name)))
