"""What a drill begins with: the whiteboard form, with more or less of it taken out.

gap      the form; the lines that matter most are missing
body     imports, signatures and docstrings
blank    the task alone
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

from xtrain.copying.forms import public_name
from xtrain.practice.drills import Drill

LEVELS = ("gap", "body", "blank")
FEWEST, MOST = 2, 6
"""Lines that a gap may have."""
INDENTED = (ast.For, ast.While, ast.With, ast.If)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def task(drill: Drill, level: str = "body") -> str:
    """The file to begin with.

    Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is not one of {', '.join(LEVELS)}")
    text = drill.solution
    tree = ast.parse(text)
    if level == "gap":
        body = with_gap(text, tree)
    elif level == "body":
        body = signatures(text, tree)
    else:
        body = f"{ast.get_source_segment(text, tree.body[0])}\n\n{outline(tree)}\n"
    return f"{about(drill, level)}\n{body}"


def about(drill: Drill, level: str) -> str:
    """Comments on top: what may be used, and how it will be checked."""
    name = public_name(drill.solution)
    uses = "the standard library"
    if drill.folder != "schedules":
        uses = "torch and the standard library"
    if drill.folder == "comm":
        uses += "; of torch.distributed send, recv, isend, irecv, batch_isend_irecv"
        if "all_to_all" in drill.solution and drill.name == "one_shot_all_reduce":
            uses = "torch and the standard library; one collective"
    kind = "class" if f"\nclass {name}" in drill.solution else "function"
    most = 6 if drill.folder == "comm" else 4
    ranks = "as data" if drill.folder == "schedules" else f"on 1 to {most} ranks"
    lines = [
        f"Drill {drill.name}, {level}: write the {kind} {name}"
        f" ({drill.minutes} minutes from a blank file).",
        f"Use {uses}.",
        f"It is checked {ranks}: values, gradients where there are any,",
        "bytes that each rank sends, order of messages.",
        f"Then: xtrain drill check {drill.name} THIS_FILE",
    ]
    return "\n".join(f"# {line}" for line in lines)


def outline(tree: ast.Module) -> str:
    """The signatures of what will be called, as comments."""
    lines = []
    for node in outer(tree):
        if not is_public(node.name):
            continue
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, node.bases))
            lines.append(f"class {node.name}" + f"({bases})" * bool(bases))
        else:
            lines.append(ast.unparse(emptied(node)).partition(":\n")[0])
    return "\n".join(f"# {line}" for line in lines)


def outer(tree: ast.Module) -> Iterator[Any]:
    """Functions, classes and methods, in their order; none inside a function."""
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            yield from (n for n in node.body if isinstance(n, FUNCTIONS))


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def emptied(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef:
    """The signature alone."""
    empty = ast.FunctionDef(
        node.name, node.args, [ast.Expr(ast.Constant(...))], [], node.returns, None,
        lineno=1,
    )  # fmt: skip
    return ast.fix_missing_locations(empty)


def signatures(text: str, tree: ast.Module) -> str:
    """The form without bodies, and without its private functions."""
    lines: list[str | None] = list(text.splitlines())
    for node in outer(tree):
        last = node.end_lineno or 0
        if not is_public(node.name):
            marks = [mark.lineno for mark in node.decorator_list]
            first = min([node.lineno, *marks])
            lines[first - 1 : last] = [None] * (last - first + 1)
        elif isinstance(node, FUNCTIONS):
            hole = " " * (node.col_offset + 4) + "raise NotImplementedError"
            first = node.body[0].lineno
            if ast.get_docstring(node) is not None:
                first = (node.body[0].end_lineno or 0) + 1
            if first <= last:
                lines[first - 1 : last] = [hole, *[None] * (last - first)]
            else:
                lines[last - 1] = f"{lines[last - 1]}\n{hole}"
    kept = "\n".join(line for line in lines if line is not None).rstrip()
    kept = re.sub(r"\n{4,}", "\n\n\n", kept)  # where private functions stood
    return re.sub(r"\n{3,}(?=[ ])", "\n\n", kept) + "\n"


def with_gap(text: str, tree: ast.Module) -> str:
    """The form without its most telling statements."""
    lines, (first, last) = text.splitlines(), gap(tree)
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    count = last - first + 1
    hole = f"raise NotImplementedError  # {count} lines are missing here"
    return "\n".join([*lines[: first - 1], " " * indent + hole, *lines[last:]]) + "\n"


def gap(tree: ast.Module) -> tuple[int, int]:
    """First and last line of what is taken out: the best block of `FEWEST` to `MOST`
    lines, by how much it sends, calls, indexes and loops."""
    blocks = []
    shown = [n for n in outer(tree) if is_public(n.name)]
    for node in (inner for one in shown for inner in ast.walk(one)):
        if isinstance(node, (*INDENTED, *FUNCTIONS)):
            body = list(node.body)
            if isinstance(node, FUNCTIONS) and ast.get_docstring(node) is not None:
                body = body[1:]
            blocks += [body[i:] for i in range(len(body))]
    sized = [(b, (b[-1].end_lineno or 0) - b[0].lineno + 1) for b in blocks if b]
    few = [(b, n) for b, n in sized if FEWEST <= n <= MOST] or sized
    block, _ = max(few, key=lambda pair: (worth(pair[0]), -pair[1]))
    return block[0].lineno, block[-1].end_lineno or 0


def worth(block: list[ast.stmt]) -> float:
    """How much a block tells."""
    nodes = [node for statement in block for node in ast.walk(statement)]
    sent = sum(
        isinstance(n, ast.Attribute) and ast.unparse(n.value) == "dist" for n in nodes
    )
    calls = sum(isinstance(n, ast.Call) for n in nodes)
    places = sum(isinstance(n, ast.Subscript | ast.BinOp) for n in nodes)
    loops = sum(isinstance(n, INDENTED) for n in nodes)
    return 2 * sent + calls + places + loops
