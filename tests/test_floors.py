"""The floors: which folder may import which, and what must stay free of torch.

The rule is written down once, in FLOORS. A file imports only from its own folder or
from a lower floor; folders on the same floor do not know each other. Nor do the
lectures of the site and of the races.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.evidence.closure import imports

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

FLOORS = [
    {"whiteboard"},  # torch only, and for `copying` alone
    {"schedules"},
    {"plan"},  # plan may ask schedules; both are standard library only
    {"evidence"},  # of ranks it knows only what they report
    {"testing"},
    {"comm"},
    {"copying"},
    {"checkpoint"},
    {
        "backends",
        "context_parallel",
        "data_parallel",
        "expert_parallel",
        "pipeline_parallel",
        "tensor_parallel",
        "zero",
    },
    {"cluster"},  # its groups use what the backends are made of
    {"model"},
    {"train"},
    {"practice", "bench"},
    {"cli"},
    {"__main__"},
]
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
TORCH_FREE = {"plan", "schedules"}
ALONE = {"whiteboard", "copying"}  # use nothing of the library, and it uses neither
USERS = {"whiteboard": {"copying"}, "copying": {"cli", "practice"}}


def broken_rules(place: str, source: str, package: str = "") -> list[str]:
    """What a file of a place, such as comm or zero.deep, must not import.

    Its package is xtrain.PLACE unless it is given.
    """
    folder, broken = place.partition(".")[0], []
    for module in imports(source, package or f"xtrain.{place}"):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if top == "xtrain_docs":
            broken.append(f"xtrain never imports {module}")
        elif top == "xtrain":
            if target in ("", "__version__") or target == folder:
                continue
            if target in ALONE and folder not in USERS[target]:
                broken.append(f"{folder} may not import {module}")
            elif folder in ALONE and target not in ALONE:
                broken.append(f"{folder} stands alone: {module}")
            elif target not in FLOOR:
                broken.append(f"{module} has no floor in FLOORS")
            elif FLOOR[target] >= FLOOR[folder]:
                broken.append(f"{folder} may not import {module}")
        elif folder in ALONE and top not in {"torch", *sys.stdlib_module_names}:
            broken.append(f"{folder} is torch only: {module}")
        elif folder in TORCH_FREE and top not in sys.stdlib_module_names:
            broken.append(f"{folder} is standard library only: {module}")
    return broken


def source_files() -> list[Path]:
    return sorted((SOURCE / "xtrain").rglob("*.py"))


def folder_of(path: Path) -> str:
    parts = path.relative_to(SOURCE / "xtrain").parts
    return parts[0] if len(parts) > 1 else path.stem


def test_every_file_keeps_to_its_floor() -> None:
    broken = []
    for path in source_files():
        folder = folder_of(path)
        if folder == "__init__":
            continue
        assert folder in FLOOR, f"{path}: give {folder} a place in FLOORS"
        package = ".".join(path.relative_to(SOURCE).parent.parts)
        for text in broken_rules(folder, path.read_text(), package):
            broken.append(f"{path.relative_to(ROOT)}: {text}")
    assert broken == []


LECTURE = re.compile(r"xtrain_docs\.lectures\.(lc\d+)|xtrain\.bench\.races\.(lc\d+)")


def lecture_of(module: str) -> str | None:
    found = LECTURE.match(module)
    return found and (found[1] or found[2])


def foreign_lectures(path: Path, source: Path = SOURCE) -> list[str]:
    """What a file of the site or of the races imports of a lecture not its own."""
    module = ".".join(path.relative_to(source).with_suffix("").parts)
    own = lecture_of(module)
    if own is None and not module.startswith("xtrain_docs"):
        return []  # a set of races that belongs to no lecture may take some of one
    return sorted(
        name
        for name in imports(path.read_text(), module.rpartition(".")[0])
        if lecture_of(name) not in (None, own)
    )


def test_lectures_share_only_what_lies_below_them() -> None:
    files = [
        *(SOURCE / "xtrain_docs").rglob("*.py"),
        *(SOURCE / "xtrain" / "bench" / "races").glob("*.py"),
    ]
    lectures = {lecture_of(".".join(f.relative_to(SOURCE).parts)) for f in files}
    assert {"lc1", "lc2", "lc3"} <= lectures
    assert {str(f): found for f in files if (found := foreign_lectures(f))} == {}


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("xtrain_docs/lectures/lc2/tables.py", "from ..lc1 import tables", True),
        ("xtrain_docs/lectures/lc2/tables.py", "from .. import lc1", True),
        ("xtrain_docs/lectures/lc2/tables.py", "from ..lc1.runs import call", True),
        ("xtrain_docs/lectures/lc2/tables.py", "from .runs import call", False),
        ("xtrain_docs/lectures/lc2/tables.py", "from ...runs import again", False),
        ("xtrain_docs/runs.py", "from .lectures.lc1.runs import call", True),
        ("xtrain_docs/blocks.py", "from . import lectures", False),
        ("xtrain/bench/races/lc3.py", "from xtrain.bench.races.lc2 import R", True),
        ("xtrain/bench/races/lc3.py", "from xtrain.bench.race import Race", False),
    ],
)
def test_a_lecture_in_another_one_is_seen(
    tmp_path: Path, file: str, line: str, broken: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"def f():\n    {line}\n")
    assert bool(foreign_lectures(path, tmp_path)) is broken


RECORDER = ("", "_calls", "_files", "_report", "_watch")
INSTRUMENTS = (
    *("ledger", "events", "message_rounds", "watched_work", "wire_bytes"),
    *("call_observer", "waiting_time"),
    *(f"flight_recorder{part}" for part in RECORDER),
)


def imports_of_instruments(source: str) -> list[str]:
    """Imports by which a file of comm would know of the ledger that watches it."""
    known = {"xtrain.comm", *(f"xtrain.comm.{name}" for name in INSTRUMENTS)}
    return [module for module in imports(source, "xtrain.comm") if module in known]


def test_algorithms_know_nothing_of_their_instruments() -> None:
    algorithms = {path.stem: path for path in (SOURCE / "xtrain/comm").glob("*.py")}
    for name in ("__init__", *INSTRUMENTS):  # the package exports everything
        del algorithms[name]
    assert {"p2p", "ring", "tree", "checks", "calls"} <= algorithms.keys()
    for name, path in algorithms.items():
        assert imports_of_instruments(path.read_text()) == [], name


@pytest.mark.parametrize(
    "source",
    [
        "from xtrain.comm.ledger import record",
        "from xtrain.comm.message_rounds import Message",
        "from .ledger import record",
        "import xtrain.comm.ledger",
        "from xtrain.comm import CommLedger",
        "def f():\n    from . import ledger",
    ],
)
def test_an_import_of_the_ledger_is_seen(source: str) -> None:
    assert imports_of_instruments(source)


def test_the_package_itself_imports_nothing() -> None:
    source = (SOURCE / "xtrain" / "__init__.py").read_text()
    assert list(imports(source, "xtrain")) == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("comm", "from xtrain.zero import Adam"),
        ("comm", "import xtrain.model.block"),
        ("comm", "def f():\n    from xtrain.train import step"),
        ("comm", "from ..zero import Adam"),
        ("comm", "from .. import zero"),
        ("comm", "from xtrain import zero"),
        ("comm", "import xtrain_docs.embed"),
        ("comm", "from xtrain.attic import thing"),
        ("comm", "from xtrain.checkpoint import save_checkpoint"),
        ("checkpoint", "from xtrain.zero import Adam"),
        ("zero", "from xtrain.data_parallel import sampler"),
        ("testing", "from xtrain.comm import ring_all_reduce"),
        ("evidence", "from xtrain.testing import World"),
        ("schedules", "from xtrain.plan import Layout"),
        ("plan", "import torch"),
        ("plan", "from numpy import array"),
        ("schedules", "import torch.nn"),
        ("zero", "from xtrain.model import XtrainModel"),
        ("model", "from xtrain.bench.race import Case"),
        ("model", "from xtrain.train import step"),
        ("bench", "from xtrain.cli import main"),
        ("comm", "from xtrain.whiteboard.comm import exchange"),
        ("bench", "import xtrain.whiteboard.zero.adamw"),
        ("zero", "from xtrain.copying import whiteboard"),
        ("whiteboard.comm", "from xtrain.comm import exchange"),
        ("whiteboard.comm", "from xtrain.plan import Layout"),
        ("whiteboard.comm", "import numpy"),
        ("copying", "from xtrain.comm import exchange"),
        ("copying", "from xtrain.plan import Layout"),
    ],
)
def test_a_wrong_import_is_seen(place: str, source: str) -> None:
    assert broken_rules(place, source)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("zero", "from xtrain.comm import ring_all_reduce"),
        ("checkpoint", "from xtrain.comm import recv_object"),
        ("zero", "from xtrain.checkpoint import save_checkpoint"),
        ("zero", "from . import flat\nfrom .flat import shard"),
        ("zero.deep", "from ..flat import shard"),
        ("plan", "from xtrain.schedules import gpipe\nimport math"),
        ("comm", "import torch\nimport xtrain"),
        ("model", "from xtrain.zero import clip\nimport xtrain.plan"),
        ("bench", "from xtrain.model import XtrainModel"),
        ("cli", "from xtrain import __version__\nimport xtrain.bench"),
        ("cli", "from xtrain.copying import whiteboard"),
        ("copying.x", "from xtrain.whiteboard.comm.exchange import f"),
        ("whiteboard.comm", "import torch\nimport math"),
    ],
)
def test_a_right_import_is_left_alone(place: str, source: str) -> None:
    assert broken_rules(place, source) == []


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
    """A script's own folder comes first on sys.path: `queue.py` would hide queue.

    What stands in for torch has torch's names, and is a package below another folder.
    """
    stand_in = ROOT / "src/xtrain/practice/stand_in"
    clashes = [
        str(path.relative_to(ROOT))
        for folder in ("src/xtrain", "snippets")
        for path in sorted((ROOT / folder).rglob("*"))
        if (path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py"))))
        and path.stem in sys.stdlib_module_names
        and stand_in not in path.parents
        and not path.stem.startswith("__")
    ]
    assert clashes == []
