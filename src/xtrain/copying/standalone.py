"""Make one symbol stand alone: it, and all of ours that it needs, in one file.

    xtrain.comm.ring:ring_all_reduce
        ring_all_reduce -> fold_into -> COMBINE        from another module of ours
                        -> torch, Tensor             an import

Names are followed from statement to statement, each copied as it stands. What runs at
import comes after what it needs. A name that is not found stops the copy: it would be
a NameError in it.
"""

import builtins
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from xtrain.copying.modules import (
    SOURCE,
    CopyError,
    Import,
    Module,
    Statement,
    module_path,
    read_module,
)
from xtrain.copying.used_names import UsedNames

OF_EVERY_MODULE = {"__name__", "__doc__"}


def standalone(reference: str, root: Path | None = None) -> str:
    """The text of a file that defines `module:name` and imports nothing of ours.

    Raises:
        CopyError: it does not exist, needs a name that nothing defines, or needs two
            different things of one name.
    """
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise CopyError(f"{reference!r} is not of the form package.module:name")
    closure = _Closure(root or SOURCE, module.split(".")[0])
    if not closure.follow(closure.read(module), name.split(".")[0]):
        raise CopyError(f"{module} defines no {name!r}")
    future = any(closure.read(s.module).future for s in closure.statements)
    blocks = [
        f"# {reference}, with everything of {closure.package} that it uses.",
        *["from __future__ import annotations"] * future,
        *_import_lines(closure.imports),
    ]
    return "\n".join(blocks) + _spaced(closure.in_order()) + "\n"


def _import_lines(imports: set[Import]) -> list[str]:
    """The import statements, all names of a module in one."""
    lines = {found.text for found in imports if found.name is None}
    for home in {found.home for found in imports if found.name is not None}:
        names = sorted(i.part for i in imports if i.home == home and i.name is not None)
        line = f"from {home} import {', '.join(names)}"
        if len(line) > 88:
            wrapped = textwrap.wrap(", ".join(names), 84)
            line = "\n    ".join([f"from {home} import (", *wrapped]) + ",\n)"
        lines.add(line)
    return sorted(lines, key=lambda line: (line.startswith("from"), line))


def _spaced(statements: list[Statement]) -> str:
    """Their texts, two empty lines between them, but none between short ones."""
    texts, above = [], ""
    for statement in statements:
        both_short = "\n" not in above + statement.text
        texts.append(("\n" if above and both_short else "\n\n\n") + statement.text)
        above = statement.text
    return "".join(texts)


@dataclass
class _Closure:
    """All statements that one name needs, and the imports."""

    root: Path
    package: str
    imports: set[Import] = field(default_factory=set)
    origins: dict[str, object] = field(default_factory=dict)  # of each name
    statements: dict[Statement, None] = field(default_factory=dict)  # used ones first
    needs: dict[Statement, dict[str, list[Statement]]] = field(default_factory=dict)

    def read(self, name: str) -> Module:
        return read_module(name, self.root)

    def follow(self, module: Module, name: str) -> list[Statement]:
        """Take what `name` means in `module` into the copy; the statements that are it.

        There are none where it is an import, or Python's own.
        """
        if name in module.defined:
            self._claim(name, (module.name, name), module.name)
            for statement in module.defined[name]:
                self._take(module, statement)
            return module.defined[name]
        if name in module.imported:
            found = module.imported[name]
            return [s for each in found for s in self._follow_import(module, each)]
        if name in OF_EVERY_MODULE or hasattr(builtins, name):
            self._claim(name, ("Python", name), module.name)
            return []
        star = f" (unless {module.star} has it: name what you import)"
        raise CopyError(
            f"{module.name} has no {name!r}" + (star if module.star else "")
        )

    def _gives(self, home: str, name: str) -> bool:
        """Whether a package imports a name that one of its modules has, too."""
        return name in self.read(home).imported

    def _follow_import(self, module: Module, found: Import) -> list[Statement]:
        if found.home.split(".")[0] != self.package:
            self._claim(found.local, found.meaning, module.name)
            self.imports.add(found)
            return []
        whole = found.home if found.name is None else f"{found.home}.{found.name}"
        given = found.name is not None and self._gives(found.home, found.name)
        if found.name is None or (module_path(whole, self.root) and not given):
            raise CopyError(
                f"{module.name} imports the module {whole}; import the names "
                "it needs instead, so that the code can be copied"
            )
        statements = self.follow(self.read(found.home), found.name)
        if found.local == found.name:
            return statements
        text = f"{found.local} = {found.name}"
        self._claim(found.local, text, module.name)
        alias = next((s for s in self.statements if s.text == text), None)
        if alias is None:
            used = UsedNames(at_once={found.name})
            alias = Statement(module.name, 0, text, used)
            self.needs[alias] = {found.name: statements}
            self.statements[alias] = None
        return [alias]

    def _claim(self, name: str, origin: object, module: str) -> None:
        known = self.origins.setdefault(name, origin)
        if known != origin:
            homes = [o[0] if isinstance(o, tuple) else module for o in (known, origin)]
            raise CopyError(
                f"two modules define {name!r}: {homes[0]} and {homes[1]}; rename one, "
                "so that the code can be copied"
            )

    def _take(self, module: Module, statement: Statement) -> None:
        if statement in self.needs:
            return
        needs = self.needs[statement] = {}
        for name in sorted(statement.used.at_once | statement.used.later):
            needs[name] = self.follow(module, name)
        self.statements[statement] = None  # after what it needs, circles apart

    def in_order(self) -> list[Statement]:
        """The statements, each after what it needs when it runs."""
        before = {s: self._needed_first(s) for s in self.statements}
        ordered: list[Statement] = []
        left = list(self.statements)
        while left:
            ready = next((s for s in left if not before[s] & set(left)), None)
            if ready is None:
                names = ", ".join(f"{s.module} line {s.line}" for s in left)
                raise CopyError(f"these need each other when they run: {names}")
            left.remove(ready)
            ordered.append(ready)
        return ordered

    def _needed_first(self, statement: Statement) -> set[Statement]:
        """What must run before a statement; all of it that it calls when it runs.

        What stands below it in its module is not needed, or it would not run there.
        """
        needs, used = self.needs[statement], statement.used
        first = {s for name in used.at_once for s in needs[name]}
        left = [s for name in used.called for s in needs[name]]
        seen: set[Statement] = set()
        while left:
            needed = left.pop()
            if needed not in seen:
                seen.add(needed)
                left += [s for found in self.needs[needed].values() for s in found]
        shared = self._shared_names(statement)
        beside = [s for s in self.statements if s.module == statement.module]
        for other in beside if shared else []:
            # `x = 1` and `use(x)` stay above `x += 1`
            if shared & (other.used.at_once | self._shared_names(other)):
                first.add(other)
        return {s for s in first | seen if not _is_below(s, statement)} - {statement}

    def _shared_names(self, statement: Statement) -> set[str]:
        """Those of its names that other statements make, too."""
        defined = self.read(statement.module).defined.items()
        return {n for n, each in defined if len(each) > 1 and statement in each}


def _is_below(other: Statement, statement: Statement) -> bool:
    return other.module == statement.module and other.line > statement.line
