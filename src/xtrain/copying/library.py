"""The library form of a public name: a folder with the modules that it needs.

    DIR/                    the package, named as the folder
        comm/ring.py        our modules, unchanged but for the package's name
        comm/__init__.py    only what these import from it
        check.py            python -m DIR.check: on 4 ranks, against another answer
        LICENSE

Files are read and not imported: this needs the standard library alone.
"""

import ast
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from xtrain.copying.forms import forms, same_name, self_check

SOURCE = Path(__file__).resolve().parents[2]  # src/, or where a wheel was installed
NOT_FOR_COPIES = {"bench", "copying", "practice", "testing", "whiteboard"}
CALLED_OTHERWISE = {
    *("chimera", "dualpipe", "dualpipe_v", "gpipe", "interleaved", "one_f_one_b"),
    *("simulate", "zb_h1", "zb_h2", "zb_v"),  # a Schedule, not lists of words
    *("combine", "dispatch", "expert_capacity", "load_balancing_loss"),
    *("gshard_moe", "moe_backward", "plan_placement", "top_k_router"),
    *("clip_grad_norm", "mesh_training_step"),  # of a wrapped model
}
"""Forms whose arguments or results the library has in another shape."""
OWN_BYTES = '''
def sends(*_: Any) -> None:
    """Those of the whiteboard form: this one may send a flag, or only what is seen."""
'''


class CopyError(ValueError):
    """This cannot be copied: the message names the rule."""


def library(root: Path = SOURCE) -> dict[str, str]:
    """Every public function and class of a lecture: its name and `module:name`."""
    found: dict[str, str] = {}
    for path in sorted((root / "xtrain").glob("*/__init__.py")):
        package = f"xtrain.{path.parent.name}"
        if path.parent.name not in NOT_FOR_COPIES:
            for name in public_names(path):
                module, node = definition(package, name, root)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.setdefault(name, f"{module}:{name}")
    return found


def public_names(path: Path) -> list[str]:
    """The names in `__all__` of a package."""
    for node in tree_of(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [str(name) for name in ast.literal_eval(value)]
    return []


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file holds; read once, as each of a package's names leads to it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str, root: Path) -> Path | None:
    """The file of a dotted module; None if it is not one of ours."""
    base = root.joinpath(*module.split("."))
    paths = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in paths if path.is_file()), None)


def definition(module: str, name: str, root: Path) -> tuple[str, ast.stmt | None]:
    """The module that defines what a module knows under a name, and the statement."""
    path = file_of(module, root)
    for node in tree_of(path).body if path else ():
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module:
                    return definition(node.module, alias.name, root)
        named = getattr(node, "name", "")
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if name in (named, *(getattr(target, "id", "") for target in targets)):
            return module, node
    return module, None


def needed(module: str, root: Path) -> tuple[set[str], dict[str, dict[str, str]]]:
    """The modules that one reaches, and per package what they import from it.

    A package's own file is needed only where a name is defined in it; of others the
    copy gets a short one, with the imported names alone.
    """
    found: set[str] = set()
    exported: dict[str, dict[str, str]] = {}
    left = [module]
    while left:
        module = left.pop()
        path = file_of(module, root)
        if module in found or path is None:
            continue
        found.add(module)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            source = file_of(node.module, root)
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if file_of(inner, root):
                    left.append(inner)
                elif source and source.name == "__init__.py":
                    home, _ = definition(node.module, alias.name, root)
                    left.append(home)
                    exported.setdefault(node.module, {})[alias.name] = home
                else:
                    left.append(node.module)
    return found, exported


def write_library(reference: str, folder: Path, root: Path = SOURCE) -> tuple[int, int]:
    """Write the package; how many modules and lines it has.

    Raises:
        CopyError: an unknown module or name, or a folder that cannot be a package.
    """
    module, _, name = reference.partition(":")
    package = folder.resolve().name
    if not package.isidentifier() or package == "xtrain":
        raise CopyError(f"{package!r} cannot be the name of the new package")
    if file_of(module, root) is None:
        raise CopyError(f"no module {module!r}")
    node = definition(module, name, root)[1]
    if node is None:
        raise CopyError(f"module {module} has no {name!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CopyError(f"{folder} exists and is not an empty folder")
    texts = package_texts(module, package, root)
    texts[Path("__init__.py")] = (
        f'"""{name}, of xtrain, with what it needs; see LICENSE."""\n'
    )
    texts[Path("check.py")] = check_of(renamed(module, package), name, node)
    for path, text in (texts | {Path("LICENSE"): licence(root)}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return len(texts), sum(len(text.splitlines()) for text in texts.values())


def package_texts(module: str, package: str, root: Path) -> dict[Path, str]:
    """The files of the package: the modules that one needs, with short `__init__`s."""
    modules, exported = needed(module, root)
    texts: dict[Path, str] = {}
    for one in modules:
        path = file_of(one, root)
        assert path is not None
        text = renamed(path.read_text(encoding="utf-8"), package)
        texts[path.relative_to(root / "xtrain")] = text
    for parent in {p for path in texts for p in path.parents}:
        asked = exported.get(".".join(["xtrain", *parent.parts]), {})
        lines = [f"from {home} import {n}" for n, home in sorted(asked.items())]
        short = renamed("\n".join([*lines, ""]), package) if lines else ""
        texts.setdefault(parent / "__init__.py", short)
    return texts


IMPORT = re.compile(r"(?m)^(?P<before>\s*(?:from|import)\s+)xtrain\b")


def renamed(text: str, package: str) -> str:
    """The text with the package's name in imports; a dotted name as well."""
    if re.fullmatch(r"xtrain(\.\w+)*", text):
        return package + text.removeprefix("xtrain")
    return IMPORT.sub(rf"\g<before>{package}", text)


def check_of(module: str, name: str, node: ast.stmt | None) -> str:
    """A program that compares what was copied with an independent answer.

    That is the self-check of the whiteboard form of the same name, if there is one and
    it is called in the same way; otherwise the program imports the name.
    """
    form = same_name(name, forms())
    head = f'"""Is {name} right on this machine? `python -m` runs the check."""\n\n'
    head += f"from {module} import {name}\n"
    if form is None or form in CALLED_OTHERWISE:
        return f"{head}\nprint({name})\n"
    cut = isinstance(node, ast.ClassDef) and ".tensor_parallel." in module
    called = f"{name}.from_full" if cut else name
    return f"{head}\n{self_check(form, called, head, OWN_BYTES)}"


def licence(root: Path) -> str:
    """The licence's text, of a checkout or of what is installed."""
    file = root.parent / "LICENSE"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        return distribution("xtrain-course").read_text("licenses/LICENSE") or ""
    except PackageNotFoundError:
        return "Apache-2.0\n"
