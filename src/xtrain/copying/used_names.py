"""Which names of its module a statement uses, and which it gives to its module.

    def ring(values, times=STEPS):      uses STEPS when it is imported,
        for value in values:            shift when it is called;
            shift(value)                values, times, value are its own

The compiler's own table of scopes says what is a parameter, a local or a name of the
module. It knows nothing of annotations in quotes, so those are read here.
"""

import ast
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

RUN_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass
class UsedNames:
    """Names of the module: needed when the statement runs, and by what it defines."""

    at_once: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)  # of those at once


def names_used(source: str, node: ast.stmt) -> UsedNames:
    """The names that a statement of a module uses; `source` is its text."""
    used = UsedNames()
    _read(symtable.symtable(source, "<copy>", "exec"), node, used, at_once=True)
    used.later |= set(_quoted(node)) - used.at_once
    used.later -= used.at_once
    used.called = used.at_once & names_called(node)
    return used


def names_bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a value."""
    bound: set[str] = set()
    for part in _own_scope(node):
        match part:
            case ast.Name(ctx=ast.Store()):
                bound.add(part.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(part.name)
            case ast.Import() | ast.ImportFrom():
                bound |= {a.asname or a.name.split(".")[0] for a in part.names}
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
    return bound


def names_changed(node: ast.stmt) -> set[str]:
    """The names whose values it changes: `TABLE[key] = 1`, `LIST.append(2)`."""
    changed = set()
    for part in _own_scope(node):
        targets: list[ast.expr] = []
        match part:
            case ast.Assign():
                targets = part.targets
            case ast.AugAssign():
                targets = [part.target]
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
                targets = [method]
        for target in targets:
            inside = target
            while isinstance(inside, ast.Attribute | ast.Subscript):
                inside = inside.value
            if inside is not target and isinstance(inside, ast.Name):
                changed.add(inside.id)
    return changed


def names_called(node: ast.stmt) -> set[str]:
    """The names in calls that it makes when it runs, those of decorators included."""
    calls: list[ast.AST] = [p for p in _at_once(node) if isinstance(p, ast.Call)]
    calls += getattr(node, "decorator_list", [])
    parts = (part for call in calls for part in ast.walk(call))
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _read(
    table: symtable.SymbolTable, node: ast.stmt, used: UsedNames, at_once: bool
) -> None:
    found = used.at_once if at_once else used.later
    for symbol in table.get_symbols():
        name = symbol.get_name()
        if table.get_type() == "module":
            mine = symbol.is_referenced()
        elif table.get_type() == "class" and symbol.is_local():
            mine = _read_before_bound(node, table, name)
        else:  # in a function named top the compiler's locals count as global, too
            implicit = symbol.is_global() and not symbol.is_local()
            mine = implicit or symbol.is_declared_global()
        if mine:
            found.add(name)
    for inner in table.get_children():
        runs = at_once and _runs_at_once(inner, node)
        _read(inner, node, used, runs)


def _runs_at_once(table: symtable.SymbolTable, node: ast.stmt) -> bool:
    """A class body and a comprehension run where they stand, a function later."""
    if table.get_type() != "function":
        return True
    return table.get_name() in ("listcomp", "setcomp", "dictcomp", "genexpr")


def _read_before_bound(node: ast.stmt, table: symtable.SymbolTable, name: str) -> bool:
    """`size = size` in a class: what is read is the module's."""
    for part in ast.walk(node):
        if not isinstance(part, ast.ClassDef) or part.name != table.get_name():
            continue
        for line in part.body:
            inside = list(_at_once(line))
            if any(isinstance(p, ast.Name) and _reads(p, name) for p in inside):
                return True
            if name in names_bound(line):
                return False
    return False


def _reads(name: ast.Name, wanted: str) -> bool:
    return name.id == wanted and isinstance(name.ctx, ast.Load)


def _own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that are of the same scope as the statement itself."""
    yield node
    if isinstance(node, ast.ClassDef | ast.Lambda | ast.FunctionDef):
        return
    if isinstance(node, ast.AsyncFunctionDef):
        return
    comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if isinstance(node, comprehension):  # only a walrus binds outside of it
        yield from (n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        return
    for child in ast.iter_child_nodes(node):
        yield from _own_scope(child)


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that are evaluated when it runs."""
    yield node
    later: Iterable[ast.AST] = ()
    if isinstance(node, RUN_LATER):
        later = node.body if isinstance(node.body, list) else [node.body]
    for child in ast.iter_child_nodes(node):
        if child not in later:
            yield from _at_once(child)


def _quoted(node: ast.stmt) -> Iterator[str]:
    """The names in annotations, and in the types of an alias, that are in quotes."""
    for part in ast.walk(node):
        annotations = [
            getattr(part, "annotation", None),
            getattr(part, "returns", None),
        ]
        match part:
            case ast.Call(func=ast.Name(id="cast"), args=[first, _]):
                annotations.append(first)
        for annotation in annotations:
            if isinstance(annotation, ast.AST):
                yield from _names_in_quotes(annotation)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
        base = node.value.value
        kind = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if kind[:1].isupper() or kind in ("dict", "list", "set", "tuple", "type"):
            yield from _names_in_quotes(node.value.slice)


def _names_in_quotes(annotation: ast.AST) -> Iterator[str]:
    if isinstance(annotation, ast.Subscript):
        base = annotation.value
        kind = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if kind == "Literal":
            return
        if kind == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            yield from _names_in_quotes(annotation.slice.elts[0])
            return
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        inside = ast.parse(annotation.value, mode="eval")
        yield from (n.id for n in ast.walk(inside) if isinstance(n, ast.Name))
        yield from _names_in_quotes(inside.body)
    for child in ast.iter_child_nodes(annotation):
        yield from _names_in_quotes(child)
