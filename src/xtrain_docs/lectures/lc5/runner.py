"""The picture and the tables of the page on the runner, drawn from runs."""

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, line, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from .figures import TITLES

WIDTH, LANE, APART, TOP, CELL = 390, 84, 68, 30, 20
"""The drawing, a rank's column, between two columns, above them, a computation."""
COLOURS = {"F": 0, "BW": 1}
Placed = dict[tuple[int, int], tuple[float, float]]


def lists_of(name: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """What each rank has executed; EvidenceError unless it is the schedule's list."""
    from xtrain.schedules import SCHEDULES, with_messages, with_reductions

    from .runs_runner import executed

    found = runs.remembered(executed, ranks, name, micro_batches)
    wanted = with_messages(with_reductions(SCHEDULES[name](ranks, micro_batches)))
    for rank, (mine, order) in enumerate(zip(found, wanted.actions, strict=True)):
        if mine != [str(action) for action in order]:
            raise EvidenceError(f"rank {rank} of {name} executed {mine}")
    return found


def placed(lists: list[list[str]]) -> Placed:
    """From where to where each action is drawn: a receive not before its send."""
    sends: dict[str, float] = {}
    ends, at = [0.0] * len(lists), [0] * len(lists)
    found: Placed = {}
    while any(at[rank] < len(mine) for rank, mine in enumerate(lists)):
        before = list(at)
        for rank, mine in enumerate(lists):
            while at[rank] < len(mine):
                action = mine[at[rank]]
                begin = ends[rank]
                if "RECV" in action:
                    if (send := sent_as(action)) not in sends:
                        break
                    begin = max(begin, sends[send] + 8.0)
                high = 7.0 if "_" in action else 15.0 if "REDUCE" in action else CELL
                found[rank, at[rank]] = begin, begin + high
                if "SEND" in action:
                    sends[action] = begin + high / 2
                ends[rank], at[rank] = begin + high + 1, at[rank] + 1
        if at == before:
            raise EvidenceError(f"no rank goes on: {at}")
    return found


def sent_as(receive: str) -> str:
    """The send that a receive belongs to: 1RECV_F0 takes what 0SEND_F0 sent."""
    stage, _, kind = receive.partition("RECV_")
    return f"{int(stage) + (-1 if kind[0] == 'F' else 1)}SEND_{kind}"


@FIGURES
def runner_executed(
    name: str = "one_f_one_b", ranks: int = 3, micro_batches: int = 3
) -> str:
    """What ranks have executed, from top to bottom, with their messages."""
    lists = lists_of(name, ranks, micro_batches)
    where = placed(lists)
    places = {
        action: sum(where[rank, n]) / 2 + TOP
        for rank, mine in enumerate(lists)
        for n, action in enumerate(mine)
    }
    parts = [
        text(left(rank) + LANE / 2, 16, f"rank {rank}", "xt-label", "middle")
        for rank in range(ranks)
    ]
    for rank, mine in enumerate(lists):
        for n, action in enumerate(mine):
            parts += drawn(rank, action, where[rank, n], places)
    high = int(max(end for _, end in where.values())) + TOP + 8
    words = (
        "Each rank's actions from top to bottom: forwards and backwards, and between "
        "the columns the messages, from a send to its receive."
    )
    title = f"What {ranks} ranks executed in a step of {TITLES[name]}"
    return fit(document(WIDTH, high, parts, title, words), WIDTH)


def left(rank: int) -> float:
    """Where a rank's column begins."""
    return 1 + rank * (LANE + APART)


def drawn(
    rank: int, action: str, span: tuple[float, float], places: dict[str, float]
) -> list[str]:
    """A computation as a cell; a receive as the arrow from its send."""
    x, (begin, end) = left(rank), (span[0] + TOP, span[1] + TOP)
    if "SEND" in action:
        return []
    if "RECV" in action:
        forward = "_F" in action
        tip = x if forward else x + LANE
        tail = left(rank - 1) + LANE if forward else left(rank + 1)
        back = -5 if forward else 5
        y = places[action]
        arrow = [line(tail, places[sent_as(action)], tip, y, "xt-line xt-s0")]
        arrow += [line(tip + back, y + d, tip, y, "xt-line xt-s0") for d in (-4, 3)]
        return arrow if forward else [part.replace("s0", "s1") for part in arrow]
    if "REDUCE" in action:
        return [text(x + LANE / 2, end, action, "xt-tick", "middle")]
    kind = next(k for k in ("BW", "F") if k in action)
    return cell(x, begin, LANE, CELL, COLOURS[kind], action, low=4, opacity=0.35)


@TABLES
def runner_messages(
    name: str = "one_f_one_b", ranks: int = 3, micro_batches: int = 8
) -> Table:
    """What each rank sends, against (p - 1) x m activations each way."""
    from xtrain.pipeline_parallel.likes import HEADER

    from .runs_runner import ROWS, WIDTH, sent

    found = runs.remembered(sent, ranks, name, micro_batches)
    activation = 4 * ROWS * WIDTH
    rows, totals = [], [0, 0]
    for rank, (first, second) in enumerate(found):
        ways = (rank < ranks - 1) + (rank > 0)
        expected = {
            "headers": [micro_batches, micro_batches * 8 * HEADER],
            "tensors": [ways * micro_batches, ways * micro_batches * activation],
        }
        if rank == ranks - 1:
            del expected["headers"]
        travels = {what: n for what, n in first.items() if what != "numbers"}
        later = {what: n for what, n in second.items() if what != "numbers"}
        if travels != expected or later != {"tensors": expected["tensors"]}:
            raise EvidenceError(f"rank {rank} sends {found[rank]}, not {expected}")
        totals[0] += expected["tensors"][0]
        totals[1] += expected["tensors"][1]
        headers = first.get("headers", [0, 0])
        rows.append([
            str(rank), str(headers[0]), f"{headers[1]:,}", str(second["tensors"][0]),
            f"{second['tensors'][1]:,}", f"{second['numbers'][1]:,}",
        ])  # fmt: skip
    formula = 2 * (ranks - 1) * micro_batches
    if totals != [formula, formula * activation]:
        raise EvidenceError(f"{totals}, not {formula} messages")
    rows.append(["all, formula", "", "", str(formula), f"{formula * activation:,}", ""])
    header = ["rank", "headers, first step", "bytes", "tensors, every step", "bytes",
              "numbers to agree, bytes"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@TABLES
def runner_memory(ranks: int = 3, sizes: tuple[int, ...] = (2, 4, 8, 16)) -> Table:
    """What rank 0 keeps at most, by the number of micro-batches."""
    from .runs_runner import kept

    names = ("gpipe", "one_f_one_b")
    found = {
        (name, m): runs.remembered(kept, ranks, name, m)[0]
        for name in names
        for m in sizes
    }
    one = found["gpipe", sizes[0]][0] // sizes[0]
    rows = []
    for m in sizes:
        most = {"gpipe": m, "one_f_one_b": min(m, ranks)}
        for name in names:
            saved, _, left_over = found[name, m]
            if saved != most[name] * one or left_over:
                raise EvidenceError(f"{name}, {m}: {found[name, m]}")
        cells = [found[name, m][n] for n in (0, 1) for name in names]
        rows.append([str(m), *(f"{cell:,}" for cell in cells)])
    header = ["micro-batches", "GPipe, saved bytes", "1F1B, saved bytes",
              "GPipe, outputs alive", "1F1B, outputs alive"]  # fmt: skip
    return Table(header, rows, "rrrrr")
