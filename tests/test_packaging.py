"""The files around the code: metadata, pins, workflows, README, the make targets."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import xtrain
from xtrain.copying import whiteboard
from xtrain.testing import verify_gpu

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11.0", "3.11.2", "3.11.9", "3.12.0", "3.13.0")


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(*extras):
    project = pyproject()["project"]
    lines = project["dependencies"] + pyproject()["build-system"]["requires"]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    parsed = [Requirement(line) for line in lines]
    return [r for r in parsed if r.name != project["name"]]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def environment(python):
    """What markers see on Linux with this Python."""
    return {
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }


def pinned_version(name, python):
    """The version of `name` that the constraints choose on Linux with `python`."""
    found = [
        pin
        for pin in pins()
        if canonicalize_name(pin.name) == canonicalize_name(name)
        and (pin.marker is None or pin.marker.evaluate(environment(python)))
    ]
    assert len(found) <= 1, f"{name} is pinned twice on Python {python}: {found}"
    return Version(str(found[0].specifier).removeprefix("==")) if found else None


# --- pyproject.toml and constraints.txt ---------------------------------------


def test_supported_versions():
    project = pyproject()["project"]
    assert project["requires-python"] == ">=3.11"
    torch = next(r for r in requirements() if r.name == "torch")
    assert str(torch.specifier) == ">=2.11"
    assert set(project["optional-dependencies"]) == {"docs", "test", "dev"}
    assert project["name"] != "xtrain", "on PyPI that is another project"
    assert project["scripts"] == {"xtrain": "xtrain.cli:main"}


def test_ranges_are_open_in_pyproject():
    for requirement in requirements("docs", "test", "dev"):
        operators = {part.operator for part in requirement.specifier}
        assert ">=" in operators, f"{requirement} names no oldest version"
        assert "==" not in operators, f"{requirement} is a pin: constraints.txt"


def test_every_constraint_is_an_exact_pin():
    for pin in pins():
        specifiers = list(pin.specifier)
        assert len(specifiers) == 1, pin
        assert specifiers[0].operator == "==", pin
        assert "*" not in specifiers[0].version, pin
        assert pin.url is None, pin
    text = (ROOT / "constraints.txt").read_text()
    assert "--" not in re.sub(r"(?m)^#.*$", "", text), "no options, hashes or indexes"
    assert "://" not in text


def test_torch_is_pinned_first_and_to_a_release():
    first = pins()[0]
    assert first.name == "torch"
    assert first.marker is None
    assert Version(str(first.specifier).removeprefix("==")) >= Version("2.13")


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_pin_inside_its_range(python):
    for requirement in requirements("docs", "test", "dev"):
        version = pinned_version(requirement.name, python)
        assert version is not None, f"{requirement.name} has no pin for Python {python}"
        assert version in requirement.specifier, f"{version} is outside {requirement}"


def installed_closure(names):
    """`names` and what they need here, as far as it is installed, without torch."""
    seen: set[str] = set()
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name in seen or name == "torch":
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        seen.add(name)
        for line in needs:
            need = Requirement(line)
            marker: Marker | None = need.marker
            if marker is None or marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(need.name))
    return seen


def test_everything_the_extras_pull_is_pinned():
    python = ".".join(map(str, sys.version_info[:3]))
    roots = {requirement.name for requirement in requirements("docs", "test", "dev")}
    pulled = sorted(installed_closure(roots))
    missing = [name for name in pulled if pinned_version(name, python) is None]
    assert missing == [], "add these to constraints.txt"


def test_every_pin_admits_the_pythons_that_it_is_for():
    """A patch release counts: Debian 12 has 3.11.2. Pins for another Python, which
    are not installed here, are looked at where that Python runs the tests."""
    refused, looked_at = [], 0
    for pin in pins():
        try:
            found = distribution(pin.name)
        except PackageNotFoundError:
            continue
        if Version(found.version).public not in pin.specifier:
            continue
        looked_at += 1
        needs = SpecifierSet(found.metadata["Requires-Python"] or "")
        refused += [
            f"{pin.name} {found.version} needs {needs}, but is pinned for {python}"
            for python in PYTHONS
            if (pin.marker is None or pin.marker.evaluate(environment(python)))
            and python not in needs
        ]
    assert looked_at > 20
    assert refused == [], "give these a marker and an older release beside it"


def test_the_pins_stand_in_order():
    names = [canonicalize_name(pin.name) for pin in pins()[1:]]
    assert names == sorted(names)


def build(target, folder):
    """The "wheel" or the "sdist" of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    done = subprocess.run(
        [*command, "-d", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = folder.iterdir()
    name = pyproject()["project"]["name"].replace("-", "_")
    assert made.name.startswith(f"{name}-{xtrain.__version__}")
    return made


def test_the_source_distribution_holds_every_file_of_the_repository(tmp_path):
    """So its tests have all they look at, also .ci/run and the workflows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = [f for f in listed.stdout.split("\0") if f and (ROOT / f).is_file()]
    assert [file for file in files if file not in names] == []
    generated = [n for n in names if n.startswith(("build/", "docs/en/assets/fonts"))]
    assert generated == []


def test_the_wheel_holds_the_package_and_nothing_that_needs_a_checkout(tmp_path):
    wheel = build("wheel", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"xtrain/__init__.py", "xtrain/py.typed", "xtrain/cli/__init__.py"} <= names
    metadata = {n for n in names if ".dist-info/" in n}
    assert any(n.endswith("entry_points.txt") for n in metadata)
    assert any(n.endswith("licenses/LICENSE") for n in metadata)
    folders = {n.split("/")[0] for n in names - metadata}
    assert folders == {"xtrain"}
    assert "xtrain/whiteboard/comm/ring_all_reduce.py" in names
    assert "xtrain/copying/self_checks/comm.py" in names
    assert not [n for n in names if "__pycache__" in n]

    # `xtrain copy` reads the sources that were installed
    installed, name = tmp_path / "installed", "ring_all_reduce"
    zipfile.ZipFile(wheel).extractall(installed)

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "xtrain", "copy", *words],
            cwd=installed,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )

    done = run(name)
    assert (done.returncode, done.stdout) == (0, whiteboard(name)), done.stderr
    assert run(name, "--library", "-o", "mine").returncode == 0
    assert (installed / "mine" / "comm" / "ring.py").is_file()
    assert "Apache" in (installed / "mine" / "LICENSE").read_text()


# --- licence and citation -------------------------------------------------------


def test_the_licence_is_the_whole_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    for number in range(1, 10):
        assert re.search(rf"(?m)^   {number}\. [A-Z]", text), f"section {number}"
    assert "END OF TERMS AND CONDITIONS" in text
    assert pyproject()["project"]["license"] == "Apache-2.0"


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert str(citation["version"]) == xtrain.__version__
    assert citation["license"] == "Apache-2.0"


# --- README, CONTRIBUTING, Makefile -----------------------------------------------


def test_readme_and_contributing_are_a_screen_each():
    for name in ("README.md", "CONTRIBUTING.md"):
        assert len((ROOT / name).read_text().splitlines()) <= 70, name


def test_the_page_on_installing_names_the_pinned_torch_and_the_newest_tested():
    text = (ROOT / "docs/en/install.md").read_text()
    flow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    newest = flow["jobs"]["cpu"]["strategy"]["matrix"]["torch"][-1]
    assert f"`make test TORCH={newest}`" in text
    assert f"`TORCH={pinned_version('torch', '3.11.9')}`, the pinned one" in text
    for page in (text, (ROOT / "README.md").read_text()):
        assert f"`{pyproject()['project']['name']}`" in page, "the name on an index"


def make_targets():
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"(?m)^([a-z-]+):", makefile))


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "docs/en/install.md", ".ci/run", "Makefile"],
)
def test_every_make_target_that_is_named_exists(document):
    text = (ROOT / document).read_text()
    pattern = (
        r"(?m)(?:`|^|'|#   ?|run: (?:>-\n +)?)make ((?:[a-z-]+ ?)+)(?=[\s`'A-Z(]|$)"
    )
    named = {word for found in re.findall(pattern, text) for word in found.split()}
    commands = {"site", "test"} if document != ".ci/run" else {"test", "build"}
    assert commands <= named
    if document != "Makefile":
        assert named <= make_targets()


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/en/install.md"]
)
def test_every_file_that_is_named_exists(document):
    text = (ROOT / document).read_text()
    named = re.findall(
        r"\b((?:src|tests|snippets|docs)/[\w/.-]*[\w/]|setup_env\.py)", text
    )
    real = [n for n in named if "NAME" not in n and "lcN" not in n and "..." not in n]
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    assert real
    folder = (ROOT / document).parent
    missing = [name for name in real if not (ROOT / name).exists()]
    missing += [link for link in links if not (folder / link).exists()]
    assert missing == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    "target", ["site", "build", "serve", "test", "test-all", "check", "wheel"]
)
def test_make_can_plan_every_target(target):
    done = subprocess.run(
        ["make", "-n", target, "ARGS=-k ring", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    )
    assert done.returncode == 0, done.stderr
    assert "setup_env.py" in done.stdout
    if target in ("test", "test-all", "check"):
        words = " ".join(done.stdout.replace("\\\n", " ").split())
        quick = "-p tests.tiers " if target == "test" else ""
        assert re.search(rf"-m pytest -n \d+ --ignore=tests/site {quick}-k ring", words)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_when_there_is_no_python(tmp_path):
    for tool in ("make", "sh", "getconf"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    done = subprocess.run(
        ["make", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stdout


# --- workflows, hooks, CI ---------------------------------------------------------


def workflows():
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_workflows_are_these():
    names = [path.stem for path in workflows()]
    assert names == ["release", "site", "tests"]


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.stem)
def test_a_workflow_is_sound(path):
    flow = yaml.safe_load(path.read_text())
    assert True in flow, "`on:` (which YAML reads as true) is missing"
    assert flow["permissions"] == {"contents": "read"}, "jobs ask for more themselves"
    for name, job in flow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        needs = job.get("needs", [])
        for need in [needs] if isinstance(needs, str) else needs:
            assert need in flow["jobs"], f"{name} needs {need}"
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            if "uses" in step:
                assert re.search(r"@(v\d+|release/v\d+)$", step["uses"]), (
                    f"pin {step['uses']} by major version"
                )


def test_the_test_matrix_covers_what_is_supported():
    flow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    matrix = flow["jobs"]["cpu"]["strategy"]["matrix"]
    classifiers = pyproject()["project"]["classifiers"]
    pythons = [c.split(" :: ")[-1] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == pythons
    torch = next(r for r in requirements() if r.name == "torch")
    oldest = Version(str(torch.specifier).removeprefix(">="))
    pinned = pinned_version("torch", "3.11.9")
    versions = [Version(version) for version in matrix["torch"]]
    assert versions == sorted(set(versions))
    assert versions[0] == oldest
    assert pinned in versions
    assert pinned is not None
    assert versions[-1] >= pinned
    assert flow["jobs"]["gpu"]["runs-on"] == ["self-hosted", "gpu"]


def test_what_takes_long_runs_on_a_schedule():
    flow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert flow[True]["schedule"]  # YAML reads `on:` as true
    assert "make test-slow" in flow["jobs"]["slow"]["steps"][-1]["run"]
    words = " ".join((ROOT / "Makefile").read_text().replace("\\\n", " ").split())
    assert '-m "slow or not slow" --hypothesis-profile=explore' in words


def test_nccls_rules_run_on_a_schedule_over_the_folders_of_verify_gpu():
    flow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    job = flow["jobs"]["nccl-rules"]
    assert job["if"] == "github.event_name == 'schedule'"
    command = job["steps"][-1]["run"].replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        ["sh", "-ec", command.replace("make", "echo")],
        capture_output=True, text=True, cwd=ROOT, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    folders = [f"tests/{name}" for name in verify_gpu.FOLDERS]
    assert all((ROOT / folder).is_dir() for folder in folders)
    expected = ["test-all", "ARGS=--backend", "nccl-rules", *folders]
    assert done.stdout.split() == expected


def test_the_site_is_built_as_ci_builds_it():
    flow = yaml.safe_load((ROOT / ".github/workflows/site.yml").read_text())
    job = flow["jobs"]["build"]
    _, _, steps = (ROOT / ".ci/run").read_text().partition("export XTRAIN_RELEASE=1\n")
    assert job["env"]["XTRAIN_RELEASE"] == "1"
    commands = [
        line for line in steps.splitlines() if line and not line.startswith("step ")
    ]
    assert [step["run"] for step in job["steps"] if "run" in step][1:] == commands


def test_hooks_run_from_the_environment():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repo in config["repos"]:
        assert repo["repo"] == "local"
        for hook in repo["hooks"]:
            assert hook["language"] == "system"
            assert hook["entry"].startswith(".venv/bin/python -m ")


def test_the_ci_script_is_strict_and_executable():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    text = script.read_text()
    assert "set -euo pipefail" in text
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_folder_of_tests_is_a_package():
    """Ranks import test functions by name, and two files may share a name."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").exists()] == []


def test_old_pythons_can_read_setup_env_far_enough_to_be_told():
    source = (ROOT / "setup_env.py").read_text()
    ast.parse(source, feature_version=(3, 7))
    first = next(n for n in ast.parse(source).body if isinstance(n, ast.If))
    assert "MINIMUM_PYTHON" in ast.unparse(first.test)
