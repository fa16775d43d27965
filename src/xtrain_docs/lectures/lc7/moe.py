"""The picture of sorted copies, and the rows that each way of computing has."""

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, line, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

WIDTH, LEFT, SIDE = 400, 74, 20


def told() -> dict[str, list]:
    """The run; EvidenceError unless every copy stands once, sorted by expert."""
    from .runs_moe import sorted_batch

    found = runs.remembered(sorted_batch, 1)[0]
    experts = [expert for row in found["experts"] for expert in row]
    order = found["order"]
    stable = sorted(range(len(experts)), key=lambda copy: experts[copy])
    if order != stable:
        raise EvidenceError(f"copies in the order {order}, sorted: {stable}")
    return found


@FIGURES
def sorted_copies() -> str:
    """Tokens with their experts, and below the copies in the order of the experts."""
    found = told()
    k = len(found["experts"][0])
    experts = [expert for row in found["experts"] for expert in row]
    parts = [text(4, 16, "before: the copies of each token", "xt-label")]
    y, x = 26.0, 0.0
    for copy, expert in enumerate(experts):
        x = LEFT + SIDE * copy + 6.0 * (copy // k) - 68
        token = copy // k
        parts += labelled(x, y, expert, token, f"token {token} for expert {expert}")
    parts.append(text(4, 86, "after: sorted by expert", "xt-label"))
    y, x = 96.0, 6.0
    before = 0
    for copy in found["order"]:
        expert, token = experts[copy], copy // k
        x += 12.0 * (expert - before)
        before = expert
        parts += labelled(x, y, expert, token, f"token {token}, for expert {expert}")
        x += SIDE
    parts += groups(found["counts"], y + SIDE)
    title = f"{len(found['experts'])} tokens and their copies, sorted by expert"
    words = f"Rows of the experts: {found['counts']}"
    return fit(document(WIDTH, 146, parts, title, words), WIDTH)


def labelled(x: float, y: float, expert: int, token: int, hover: str) -> list[str]:
    """A cell in the colour of an expert, with the number of its token."""
    return cell(x, y, SIDE - 2, SIDE - 2, expert, str(token), low=5, opacity=0.35,
                radius=0, hover=hover)  # fmt: skip


def groups(counts: list[int], y: float) -> list[str]:
    """A line and a name under the rows of each expert."""
    parts, x = [], 6.0
    for expert, count in enumerate(counts):
        end = x + SIDE * count
        if count:
            parts.append(line(x, y + 4, end - 2, y + 4, "xt-axis"))
            middle = max(28.0, (x + end) / 2 - 1)
            parts.append(text(middle, y + 20, f"expert {expert}", "xt-tick", "middle"))
        x = end + 12.0
    return parts


@TABLES
def expert_paths() -> Table:
    """Rows computed by each way: masks, padding, and sorted rows alone."""
    from .runs_moe import EXPERTS, TOKENS, TOP_K, rows_computed

    experts = [expert for row in told()["experts"] for expert in row]
    batches = {
        "the batch of the picture": sorted(experts),
        "all copies to one expert": [0] * (TOKENS * TOP_K),
    }
    rows = []
    for name, one in batches.items():
        found = runs.remembered(rows_computed, 1, one)[0]
        most = max(one.count(expert) for expert in range(EXPERTS))
        right = {"loop": len(one), "padded": EXPERTS * most}
        if found != right:
            raise EvidenceError(f"{name}: {found}, not {right}")
        rows.append([name, str(len(one)), str(EXPERTS * len(one)),
                     str(found["padded"]), str(found["loop"])])  # fmt: skip
    header = ["", "copies", "all copies through each expert", "padded",
              "loop, grouped"]  # fmt: skip
    return Table(header, rows, "lrrrr")
