"""What NCCL asks of a program, one rule a line, each with the place it comes from.

Places: P is torch/distributed/distributed_c10d.py, F is ProcessGroupNCCL.cpp, U is
NCCLUtils.hpp of torch 2.13; N is NVIDIA's NCCL user guide.
"""

from dataclasses import dataclass

from xtrain.backends.calls import CallRefused


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of NCCL.

    Attributes:
        text: the rule, as a sentence.
        source: where torch or NCCL states it.
        cure: what to do about it.
    """

    text: str
    source: str
    cure: str


RULES = {
    "dtype": Rule(
        "NCCL moves int8, uint8, int32, int64, float16, bfloat16, float32, float64, "
        "bool, float8_e4m3fn and float8_e5m2",
        "U ncclDataType map",
        "convert the tensor",
    ),
    "complex": Rule(
        "Torch hands complex tensors to NCCL as pairs of reals in some collectives "
        "only",
        "P all_reduce, reduce_scatter",
        "use torch.view_as_real",
    ),
    "bitwise": Rule(
        "NCCL has no bitwise reductions",
        "F getNcclReduceOp",
        "gather the tensors and combine them, or use MAX and MIN on bool tensors",
    ),
    "bool average": Rule(
        "NCCL cannot average bool tensors", "F getNcclReduceOp", "convert the tensor"
    ),
    "contiguous": Rule(
        "Collectives of NCCL take contiguous tensors",
        "F check_gpu_single_tensor, P _check_tensor_list",
        "call .contiguous() and copy the result back",
    ),
    "dense": Rule(
        "NCCL moves dense tensors whose elements do not overlap",
        "F check_gpu_single_tensor",
        "call .contiguous() and copy the result back",
    ),
    "equal parts": Rule(
        "Gather and scatter of NCCL move parts of one size",
        "F gather, scatter",
        "pad the parts, or send them one by one",
    ),
    "any source": Rule(
        "NCCL receives from a rank that is named",
        "F recvAnysource",
        "tell the receiver who sends, by an earlier message",
    ),
    "to itself": Rule(
        "An unbatched message to the rank itself has no peer that could receive it",
        "P _check_not_self_rank, F pointToPoint",
        "copy the tensor",
    ),
    "not there": Rule(
        "Torch's NCCL has no coalesced all-gather of lists",
        "F allgather_coalesced",
        "use all_gather_single in _coalescing_manager, or one call each",
    ),
    "success": Rule(
        "Work of NCCL does not tell whether it succeeded",
        "F WorkNCCL::isSuccess",
        "call wait(), or ask is_completed()",
    ),
    "tags": Rule(
        "NCCL ignores tags: the order of the calls decides which message is received",
        "P send, recv; F send, recv",
        "receive in the order in which the other rank sends",
    ),
    "sizes": Rule(
        "NCCL does not compare the two ends of a message: with other sizes it hangs "
        "or delivers garbage",
        "N point-to-point",
        "send what the other rank receives",
    ),
    "calls": Rule(
        "NCCL does not compare the calls of its ranks: with other calls it hangs or "
        "delivers garbage",
        "N collectives",
        "make the same call on all ranks",
    ),
    "first use": Rule(
        "Two ranks make a communicator at their first unbatched message, and both "
        "programs block until it is there",
        "F pointToPoint, getNCCLComm",
        "use batch_isend_irecv, or let one rank of each pair begin with the receive",
    ),
    "group's first use": Rule(
        "The ranks of a group make its communicator at its first collective or batch, "
        "and all programs block until it is there",
        "F getNCCLComm; P batch_isend_irecv",
        "let all ranks of the group join its first call",
    ),
    "one queue a pair": Rule(
        "Unbatched messages of two ranks share one stream, in the order of the calls, "
        "in both directions",
        "F pointToPoint; N point-to-point",
        "use batch_isend_irecv, or let one of the two receive first",
    ),
    "one queue a group": Rule(
        "Collectives and batches of a group, and with device_id= all its messages, "
        "run one after another, in the order of the calls",
        "F collective, startCoalescing, pointToPoint",
        "make collectives in the same order on all ranks, and put messages that need "
        "each other into one batch_isend_irecv",
    ),
    "overwritten": Rule(
        "A call reads and writes its tensors until its work is waited for",
        "P isend; F collective",
        "wait for the work before you write to the tensor",
    ),
    "two streams": Rule(
        "Calls of two groups run beside each other until their works are waited for",
        "F collective, WorkNCCL::wait",
        "wait for the first call before the second uses the same tensor",
    ),
    "order of groups": Rule(
        "Calls of two groups that are in flight together must be issued in the same "
        "order on all ranks",
        "P new_group; N communicators",
        "wait for the call of one group before the call of the other, or issue them "
        "in one order",
    ),
    "watchdog": Rule(
        "A call that is not over within the timeout ends the process, and no except "
        "clause catches that",
        "F Watchdog::runLoop",
        "find out why a rank did not come: its own error, another branch, another "
        "order",
    ),
}


class NcclRuleError(CallRefused):
    """A call that NCCL refuses, hangs in, or answers with garbage.

    `rule` is its name, a key of `RULES`.
    """

    def __init__(self, rule: str, text: str):
        super().__init__(text)
        self.rule = rule


def broken(rule: str, call: object, values: str) -> NcclRuleError:
    """The error of a call that breaks a rule: its values, the rule, the cure."""
    return NcclRuleError(rule, f"{call}: {values}. {in_words(rule)}")


def in_words(rule: str) -> str:
    """A rule with its name, its source and its cure."""
    of = RULES[rule]
    return f'{of.text} (rule "{rule}", {of.source}): {of.cure}'
