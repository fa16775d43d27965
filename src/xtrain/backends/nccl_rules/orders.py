"""Whether calls of two groups, in flight together, have one order on all ranks."""

import torch.distributed as dist

from xtrain.backends.nccl_rules.board import PREFIX, WaitBoard
from xtrain.backends.nccl_rules.rules import broken
from xtrain.backends.nccl_rules.streams import StreamWork


def check_order(board: WaitBoard, work: StreamWork) -> None:
    """NcclRuleError if another rank issued this call before one that was earlier here.

    Called when `work` is posted. The first rank that has two calls of two groups in
    flight leaves their order in the store of the job, the others compare theirs.
    """
    if work.number is None:
        return
    for stream in list(board.streams):
        shared = {*stream.members} & {*work.stream.members}
        if stream is work.stream or len(shared) < 2:
            continue
        for earlier in list(stream.calls):
            if earlier.number is not None:
                _compare(board, earlier, work)


def _compare(board: WaitBoard, earlier: StreamWork, later: StreamWork) -> None:
    names = [f"{w.stream.name} #{w.number}" for w in (earlier, later)]
    key = f"{PREFIX}order/{'/'.join(sorted(names))}"
    order = f"{names[0]}\n{earlier.operation.call}\n{later.operation.call}"
    mine = f"{order}\nrank {dist.get_rank()}"
    found = board.store().compare_set(key, "", mine).decode()
    if found.partition("\n")[0] != names[0]:
        _, first, second, rank = found.split("\n")
        values = (
            f"this call is issued while {earlier.operation.call} is in flight, but "
            f"{rank} issued {first} first and then {second}"
        )
        raise broken("order of groups", later.operation.call, values)
