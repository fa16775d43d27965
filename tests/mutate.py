"""Mutants: break the source in one small place at a time and see whether a test fails.

    python -m tests.mutate --files src/xtrain/comm/*.py --count 20 --seed 7

A mutant is one operator of OPERATORS at one place of the syntax tree. The seed draws an
operator, then a place for it, so that numbers, which stand everywhere, do not crowd out
the rest. Mutants run in a copy of this folder, never in the working tree: first the
tests named after the file, then those that name its module; with `--widen` all of its
folder. A failing test catches a mutant, and so does a run that never ends.

What survives is for a person to judge: either no test holds that code to anything, or
the change changes nothing.
"""

import argparse
import ast
import contextlib
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
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", "build", "dist", "*.egg-info")
# Nothing can notice a change of these: annotations, and the words of errors.
FIELDS_LEFT_OUT = ("annotation", "returns", "decorator_list", "bases", "exc")

NEGATED = {
    ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}  # fmt: skip
NEGATED |= {after: before for before, after in NEGATED.items()}
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change, and the file's whole text after it."""

    file: Path
    line: int
    operator: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}  [{self.operator}]"
        return f"{place}\n    - {self.before}\n    + {self.after}"


def with_operator(node: ast.AST, table: dict) -> Iterator[ast.AST]:
    """`a < b` becomes `a <= b`, `a + b` becomes `a - b`, ..."""
    old = node.ops[0] if isinstance(node, ast.Compare) else node.op  # type: ignore
    if type(old) in table and len(getattr(node, "ops", [old])) == 1:
        new = copy.deepcopy(node)
        new.op, new.ops = table[type(old)](), [table[type(old)]()]  # type: ignore
        yield new


def another_constant(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def negated_condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[ast.AST]:
    if not isinstance(node.test, (ast.Compare, ast.Constant)):  # have their own
        new = copy.copy(node)
        new.test = ast.UnaryOp(ast.Not(), node.test)
        yield new


def without_keyword(node: ast.Call) -> Iterator[ast.AST]:
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            new = copy.deepcopy(node)
            del new.keywords[place]
            yield new


def swapped_arguments(node: ast.Call) -> Iterator[ast.AST]:
    for place in range(len(node.args) - 1):
        new = copy.deepcopy(node)
        new.args[place : place + 2] = reversed(new.args[place : place + 2])
        if not any(isinstance(arg, ast.Starred) for arg in node.args):
            yield new


def without_statement(node: ast.stmt) -> Iterator[ast.AST]:
    kinds = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)
    stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    if stored or isinstance(node, kinds):  # without a name all would fail
        yield ast.Pass()
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()


def early_return(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Expr, ast.AugAssign)):
        yield ast.Return(None)


OPERATORS: dict[str, tuple[tuple[type, ...], Callable[..., Iterator[ast.AST]]]] = {
    "negated comparison": ((ast.Compare,), lambda n: with_operator(n, NEGATED)),
    "moved boundary": ((ast.Compare,), lambda n: with_operator(n, BOUNDARY)),
    "arithmetic": (
        (ast.BinOp, ast.AugAssign, ast.BoolOp),
        lambda n: with_operator(n, ARITHMETIC),
    ),
    "constant": ((ast.Constant,), another_constant),
    "negated condition": ((ast.If, ast.While, ast.IfExp), negated_condition),
    "not dropped": (
        (ast.UnaryOp,),
        lambda n: iter([n.operand] if isinstance(n.op, ast.Not) else []),
    ),
    "half a condition": ((ast.BoolOp,), lambda n: iter([n.values[0], n.values[-1]])),
    "without keyword": ((ast.Call,), without_keyword),
    "swapped arguments": ((ast.Call,), swapped_arguments),
    "without statement": ((ast.stmt,), without_statement),
    "early return": ((ast.stmt,), early_return),
}


def places(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that may change."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if text or isinstance(node, ast.JoinedStr):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in FIELDS_LEFT_OUT:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from places(child)


def mutants_of(file: Path) -> list[Mutant]:
    """All mutants of one file."""
    text = file.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree, mutants = ast.parse(text), []
    seen = {ast.dump(tree)}
    for node in places(tree):
        for operator, (types, change) in OPERATORS.items():
            for new in change(node) if isinstance(node, types) else ():
                span, put = node, new
                if operator == "negated condition":  # its test alone, not its body
                    span, put = node.test, new.test
                first = starts[span.lineno - 1] + span.col_offset
                last = starts[span.end_lineno - 1] + span.end_col_offset
                after = ast.unparse(ast.fix_missing_locations(put))
                inner = f"({after})" if isinstance(put, ast.expr) else after
                source = text[:first] + inner.encode() + text[last:]
                try:
                    dump = ast.dump(compile(source, file, "exec", ast.PyCF_ONLY_AST))
                    compile(source, file, "exec")  # `return` outside a function
                except SyntaxError:
                    continue
                if dump not in seen:
                    seen.add(dump)
                    told = (file, span.lineno, operator, ast.unparse(span), after)
                    mutants.append(Mutant(*told, source.decode()))
    return mutants


def draw(files: list[Path], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the files: an operator by lot, then one of its places."""
    lots = random.Random(seed)
    left: dict[str, list[Mutant]] = {}
    for mutant in (mutant for file in files for mutant in mutants_of(file)):
        left.setdefault(mutant.operator, []).append(mutant)
    drawn: list[Mutant] = []
    while left and len(drawn) < count:
        operator = lots.choice(sorted(left))
        drawn.append(left[operator].pop(lots.randrange(len(left[operator]))))
        left = {name: mutants for name, mutants in left.items() if mutants}
    return drawn


def likely_tests(file: Path, widen: bool) -> list[str]:
    """Test files of the source's folder, the likeliest to notice a change first."""
    folder = file.parent.name
    naming = re.compile(rf"\b{folder}\.{file.stem}\b")
    found = []
    for test in sorted(Path("tests", folder).glob("test_*.py")):
        named = test.stem.startswith(f"test_{file.stem}")
        likely = named or bool(naming.search(test.read_text()))
        if likely or widen:
            found.append((not named, not likely, str(test)))
    return [test for *_, test in sorted(found)] or [f"tests/{folder}"]


def run_tests(folder: Path, arguments: list[str], limit: float) -> str:
    """What pytest makes of the copy in `folder`."""
    source, begun = str(folder / "src"), time.monotonic()
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"caught: not finished after {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the ranks it left behind
            process.wait()
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    seconds = f"after {time.monotonic() - begun:.0f} s"
    if code == 0:
        return f"SURVIVED {seconds}"
    return f"caught {seconds}: {failed[1] if failed else f'pytest ended with {code}'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", nargs="+", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="for pytest, instead of the likely")
    parser.add_argument("--widen", action="store_true", help="the whole test folder")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a mutant")
    parser.add_argument("--only", type=int, nargs="+", help="run these numbers again")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)

    drawn = draw(options.files, options.count, options.seed)
    chosen = options.only or list(range(1, len(drawn) + 1))
    print(f"seed {options.seed}: {len(drawn)} mutants", flush=True)
    if options.list:
        print(*(f"{n}. {drawn[n - 1]}" for n in chosen), sep="\n")
        return 0
    survivors, sound = [], set[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary, "copy")
        shutil.copytree(".", folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for number in chosen:
            mutant = drawn[number - 1]
            print(f"{number}. {mutant}", flush=True)
            tests = options.tests or likely_tests(mutant.file, options.widen)
            if not sound.issuperset(tests):  # a red test would catch everything
                told = run_tests(folder, tests, options.limit)
                if not told.startswith("SURVIVED"):
                    sys.exit(f"without any mutant: {told}")
                sound.update(tests)
            original = (folder / mutant.file).read_text()
            (folder / mutant.file).write_text(mutant.source)
            told = run_tests(folder, tests, options.limit)
            (folder / mutant.file).write_text(original)
            print(f"    {told}", flush=True)
            survivors += [number] if told.startswith("SURVIVED") else []
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught; left: {survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
