"""The floors: which folder may import which, and what must stay free of torch.

The rule is written down once, in FLOORS. A file imports only from its own folder or
from a lower floor; folders on the same floor do not know each other.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

FLOORS = [
    {"schedules"},
    {"plan"},  # plan may ask schedules; both are standard library only
    {"testing"},
    {"comm"},
    {
        "backends",
        "context_parallel",
        "data_parallel",
        "expert_parallel",
        "pipeline_parallel",
        "tensor_parallel",
        "zero",
    },
    {"model"},
    {"train"},
    {"practice", "bench"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
TORCH_FREE = {"plan", "schedules"}


def imported_modules(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """(line, absolute module) of every import, also those inside functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = package.split(".")[: -(node.level - 1) or None]
                module = ".".join([*parent, *([module] if module else [])])
            if module == "xtrain" or (node.level and not node.module):
                # `from xtrain import comm`: the names may be folders
                found += [(node.lineno, f"{module}.{a.name}") for a in node.names]
            else:
                found.append((node.lineno, module))
    return found


def broken_rules(folder: str, package: str, source: str) -> list[str]:
    """What `source`, a file of `folder`, imports although it must not."""
    broken = []
    for line, module in imported_modules(ast.parse(source), package):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if top == "xtrain_docs":
            broken.append(f"line {line}: xtrain never imports {module}")
        elif top == "xtrain":
            if target in ("", "__version__") or target == folder:
                continue
            if target not in FLOOR:
                broken.append(f"line {line}: {module} has no floor in FLOORS")
            elif FLOOR[target] >= FLOOR[folder]:
                broken.append(f"line {line}: {folder} may not import {module}")
        elif folder in TORCH_FREE and top not in sys.stdlib_module_names:
            broken.append(f"line {line}: {folder} is standard library only: {module}")
    return broken


def source_files() -> list[Path]:
    return sorted((SOURCE / "xtrain").rglob("*.py"))


def folder_of(path: Path) -> str:
    parts = path.relative_to(SOURCE / "xtrain").parts
    return parts[0] if len(parts) > 1 else path.stem


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).parent.parts)


def test_every_file_keeps_to_its_floor() -> None:
    broken = []
    for path in source_files():
        folder = folder_of(path)
        if folder == "__init__":
            continue
        assert folder in FLOOR, f"{path}: give {folder} a place in FLOORS"
        for text in broken_rules(folder, package_of(path), path.read_text()):
            broken.append(f"{path.relative_to(ROOT)} {text}")
    assert broken == []


def test_the_package_itself_imports_nothing() -> None:
    tree = ast.parse((SOURCE / "xtrain" / "__init__.py").read_text())
    assert imported_modules(tree, "xtrain") == []


@pytest.mark.parametrize(
    ("folder", "package", "source"),
    [
        ("comm", "xtrain.comm", "from xtrain.zero import Adam"),
        ("comm", "xtrain.comm", "import xtrain.model.block"),
        ("comm", "xtrain.comm", "def f():\n    from xtrain.train import step"),
        ("comm", "xtrain.comm", "from ..zero import Adam"),
        ("comm", "xtrain.comm", "from .. import zero"),
        ("comm", "xtrain.comm", "from xtrain import zero"),
        ("comm", "xtrain.comm", "import xtrain_docs.embed"),
        ("comm", "xtrain.comm", "from xtrain.attic import thing"),
        ("zero", "xtrain.zero", "from xtrain.data_parallel import sampler"),
        ("testing", "xtrain.testing", "from xtrain.comm import ring_all_reduce"),
        ("schedules", "xtrain.schedules", "from xtrain.plan import Layout"),
        ("plan", "xtrain.plan", "import torch"),
        ("plan", "xtrain.plan", "from numpy import array"),
        ("schedules", "xtrain.schedules", "import torch.nn"),
        ("zero", "xtrain.zero", "from xtrain.model import XtrainModel"),
        ("model", "xtrain.model", "from xtrain.bench.race import Case"),
        ("model", "xtrain.model", "from xtrain.train import step"),
        ("bench", "xtrain.bench", "from xtrain.cli import main"),
    ],
)
def test_a_wrong_import_is_seen(folder: str, package: str, source: str) -> None:
    assert len(broken_rules(folder, package, source)) == 1


@pytest.mark.parametrize(
    ("folder", "package", "source"),
    [
        ("zero", "xtrain.zero", "from xtrain.comm import ring_all_reduce"),
        ("zero", "xtrain.zero", "from . import flat\nfrom .flat import shard"),
        ("zero", "xtrain.zero.deep", "from ..flat import shard"),
        ("plan", "xtrain.plan", "from xtrain.schedules import gpipe\nimport math"),
        ("comm", "xtrain.comm", "import torch\nimport xtrain"),
        ("model", "xtrain.model", "from xtrain.zero import clip\nimport xtrain.plan"),
        ("bench", "xtrain.bench", "from xtrain.model import XtrainModel"),
        ("cli", "xtrain", "from xtrain import __version__\nimport xtrain.bench"),
    ],
)
def test_a_right_import_is_left_alone(folder: str, package: str, source: str) -> None:
    assert broken_rules(folder, package, source) == []


def run_python(code: str, *flags: str) -> str:
    """What `code` prints in a new interpreter that finds src first."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_xtrain_loads_nothing_else() -> None:
    code = (
        "before = set(sys.modules)\n"
        "import xtrain\n"
        "print(sorted(set(sys.modules) - before))"
    )
    assert run_python(code) == "['xtrain']"


@pytest.mark.parametrize(
    "folder",
    [name for name in sorted(TORCH_FREE) if (SOURCE / "xtrain" / name).exists()],
)
def test_torch_free_folders_run_without_site_packages(folder: str) -> None:
    modules = [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in sorted((SOURCE / "xtrain" / folder).rglob("*.py"))
    ]
    # -I -S: no site-packages, as in the browser
    code = (
        "import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run_python(code, "-I", "-S") == "False False"


def test_help_and_version_need_no_torch() -> None:
    code = (
        "sys.modules['torch'] = None  # an import of torch would now fail\n"
        "from xtrain.cli import main\n"
        "print(main([]))"
    )
    assert run_python(code).endswith("2")


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """A script's own folder comes first on sys.path: `queue.py` would hide queue."""
    clashes = [
        str(path.relative_to(ROOT))
        for folder in ("src/xtrain", "snippets")
        for path in sorted((ROOT / folder).rglob("*"))
        if (path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py"))))
        and path.stem in sys.stdlib_module_names
        and not path.stem.startswith("__")
    ]
    assert clashes == []
