"""Mutants: break the source in one small place at a time and see whether a test fails.

    python -m tests.mutate --files src/xtrain/comm/*.py --count 20 --seed 7

Candidates are found in the syntax tree: one operator of OPERATORS at one place. `--seed`
draws an operator, then a place, so that what is frequent (numbers) does not crowd out
what is rare. Every mutant runs in a copy of the repository, never in the working tree:
tests named after the file first, then those that mention it, with `--widen` the whole
test folder. A failing test catches a mutant, and so does a run that ends too late.

What survives is for a person to judge: code that no test holds to anything, or a change
that changes nothing. `--list` prints the mutants and runs nothing, `--only 3,5` runs
these of them again.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", "build", "dist", "*.egg-info")

NEGATED = {
    ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}  # fmt: skip
NEGATED |= {after: before for before, after in NEGATED.items()}
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def _flip(node: ast.Compare, table: dict) -> Iterator[ast.AST]:
    if len(node.ops) == 1 and type(node.ops[0]) in table:
        flipped = copy.deepcopy(node)
        flipped.ops = [table[type(node.ops[0])]()]
        yield flipped


def _arithmetic(node: ast.BinOp | ast.AugAssign) -> Iterator[ast.AST]:
    if type(node.op) in ARITHMETIC:
        other = copy.deepcopy(node)
        other.op = ARITHMETIC[type(node.op)]()
        yield other


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def _condition(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, (ast.IfExp, ast.If, ast.While)):
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp, ast.Constant)):
            yield ast.UnaryOp(ast.Not(), node.test)  # stands in for the test


def _and_or(node: ast.BoolOp) -> Iterator[ast.AST]:
    other = copy.deepcopy(node)
    other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield other
    yield node.values[0]


def _keyword(node: ast.Call) -> Iterator[ast.AST]:
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            without = copy.deepcopy(node)
            del without.keywords[place]
            yield without


def _swap(node: ast.Call) -> Iterator[ast.AST]:
    for place in range(len(node.args) - 1):
        swapped = copy.deepcopy(node)
        args = swapped.args
        args[place], args[place + 1] = args[place + 1], args[place]
        if not any(isinstance(arg, ast.Starred) for arg in args):
            yield swapped


def _drop(node: ast.stmt) -> Iterator[ast.AST]:
    stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    kinds = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Assert)
    if stored or isinstance(node, kinds):
        yield ast.Pass()
    if isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()


def _leave(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Expr, ast.AugAssign)):
        yield ast.Return(None)


Operator = Callable[..., Iterator[ast.AST]]
OPERATORS: dict[str, tuple[tuple[type, ...], Operator]] = {
    "negate comparison": ((ast.Compare,), lambda node: _flip(node, NEGATED)),
    "move boundary": ((ast.Compare,), lambda node: _flip(node, BOUNDARY)),
    "arithmetic": ((ast.BinOp, ast.AugAssign), _arithmetic),
    "constant": ((ast.Constant,), _constant),
    "negate condition": ((ast.UnaryOp, ast.IfExp, ast.If, ast.While), _condition),
    "and/or": ((ast.BoolOp,), _and_or),
    "drop keyword": ((ast.Call,), _keyword),
    "swap arguments": ((ast.Call,), _swap),
    "drop statement": ((ast.stmt,), _drop),
    "return early": ((ast.stmt,), _leave),
}


@dataclass(frozen=True)
class Mutant:
    """One change: the file, the line where it begins, and the whole text after it."""

    file: Path
    line: int
    operator: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}  [{self.operator}]"
        return f"{place}\n    - {self.before}\n    + {self.after}"


def _ignored(tree: ast.Module) -> set[ast.AST]:
    """Nodes where a change means nothing: annotations, texts, constants' lists."""
    roots: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            roots.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            roots += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            roots += [*node.bases, *node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            roots.append(node.annotation)
        elif isinstance(node, ast.JoinedStr):
            roots.append(node)
        elif isinstance(node, ast.Raise):
            roots.append(node.exc)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            roots.append(node)  # a docstring, or `...`
    return {inner for root in roots if root is not None for inner in ast.walk(root)}


def mutants_of(file: Path, root: Path = ROOT) -> list[Mutant]:
    """All mutants of one file; `file` is relative to `root`."""
    text = (root / file).read_bytes()
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    ignored, found, seen = _ignored(tree), [], {ast.dump(tree)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = {inner for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        for operator, (types, change) in OPERATORS.items():
            if node in ignored or not isinstance(node, types):
                continue
            if operator == "return early" and node not in inside:
                continue
            # A negated condition replaces the test alone, not what depends on it.
            negated = operator == "negate condition" and hasattr(node, "test")
            span = node.test if negated else node
            first = starts[span.lineno - 1] + span.col_offset
            last = starts[span.end_lineno - 1] + span.end_col_offset
            for new in change(node):
                after = ast.unparse(ast.fix_missing_locations(new))
                if isinstance(new, (ast.BoolOp, ast.BinOp, ast.Compare)):
                    after = f"({after})"
                source = text[:first] + after.encode() + text[last:]
                try:
                    dump = ast.dump(ast.parse(source))
                except SyntaxError:
                    continue
                if dump not in seen:
                    seen.add(dump)
                    before = " ".join(text[first:last].decode().split())
                    place = (file, span.lineno, operator, before, after)
                    found.append(Mutant(*place, source.decode()))
    return found


def draw(files: list[Path], count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """`count` mutants of the files: an operator by lot, then one of its places."""
    lots = random.Random(seed)
    places: dict[str, list[Mutant]] = {}
    for mutant in (mutant for file in files for mutant in mutants_of(file, root)):
        places.setdefault(mutant.operator, []).append(mutant)
    drawn: list[Mutant] = []
    while places and len(drawn) < count:
        operator = lots.choice(sorted(places))
        left = places[operator]
        drawn.append(left.pop(lots.randrange(len(left))))
        if not left:
            del places[operator]
    return drawn


def tests_for(file: Path, root: Path = ROOT, widen: bool = False) -> list[str]:
    """Test files for a source file, the likeliest to notice first."""
    folder = root / "tests" / file.parent.name
    module = f"{file.parent.name}.{file.stem}"
    mentions = re.compile(
        rf"\b{module}\b|\b{file.parent.name} import .*\b{file.stem}\b"
    )
    ranks = []
    for test in sorted(folder.glob("test_*.py")):
        named = test.stem == f"test_{file.stem}"
        mentioned = mentions.search(test.read_text())
        rank = 0 if named else 1 if mentioned else 2
        if rank < 2 or widen:
            ranks.append((rank, str(test.relative_to(root))))
    tests = [test for _, test in sorted(ranks)]
    return tests or [str(folder.relative_to(root))]


def run_tests(copy_: Path, arguments: list[str], limit: float) -> tuple[str, float]:
    """passed, failed (and by which test) or timeout; and the seconds."""
    environment = {**os.environ, "PYTHONPATH": str(copy_ / "src")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", *arguments],
            cwd=copy_, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and ranks that it left behind
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        text = output.read()
    seconds = time.monotonic() - begun
    if code is None:
        return "timeout", seconds
    if code == 0:
        return "passed", seconds
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return f"failed {failed[1] if failed else f'(pytest: {code})'}", seconds


def verdict(mutant: Mutant, copy_: Path, arguments: list[str], limit: float) -> str:
    """Put the mutant into the copy, run the tests, put the original back."""
    file = copy_ / mutant.file
    original = file.read_text()
    file.write_text(mutant.source)
    try:
        outcome, seconds = run_tests(copy_, arguments, limit)
    finally:
        file.write_text(original)
    word = {"passed": "SURVIVED", "timeout": "caught by timeout"}.get(outcome)
    return f"{word or outcome.replace('failed', 'caught by', 1)}  ({seconds:.0f} s)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", nargs="+", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="instead of the files' own")
    parser.add_argument("--pytest", nargs="*", default=[], help="more for pytest")
    parser.add_argument("--widen", action="store_true", help="the whole test folder")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a mutant")
    parser.add_argument("--only", help="numbers of the mutants to run, as 3,5")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)

    drawn = draw(options.files, options.count, options.seed)
    chosen = range(1, len(drawn) + 1)
    if options.only:
        chosen = [int(number) for number in options.only.split(",")]
    print(f"seed {options.seed}, {len(drawn)} mutants", flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_ = Path(folder, "copy")
        if not options.list:
            shutil.copytree(ROOT, copy_, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for number in chosen:
            mutant = drawn[number - 1]
            print(f"{number}. {mutant}", flush=True)
            if options.list:
                continue
            tests = options.tests or tests_for(mutant.file, ROOT, options.widen)
            told = verdict(mutant, copy_, tests + options.pytest, options.limit)
            survivors += told.startswith("SURVIVED")
            print(f"    {told}", flush=True)
        if not options.list:
            print(f"{len(chosen) - survivors} of {len(chosen)} caught", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
