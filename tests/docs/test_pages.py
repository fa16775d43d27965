"""Every page people write: no typed code or numbers, every embed renders."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.rendering import EXTENSIONS, render, site_settings
from xtrain.evidence.marks import marked_tests
from xtrain_docs import authored, config, guards, symbols
from xtrain_docs.authored import embedded, pages

PAGES = pages()
NAMES = [page.relative_to(config.PAGES).as_posix() for page in PAGES]
EMBEDDED = sorted(embedded())
CONTROL = re.compile(
    r"<(?:a|summary|button|label)\b[^>]*>(.*?)</(?:a|summary|button|label)>", re.DOTALL
)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_typed_code_or_numbers_and_a_title_with_a_description(page):
    text = page.read_text()
    assert guards.typed_code(text) == []
    assert guards.typed_numbers(text) == []
    assert text.startswith("---\n"), "front matter with title and description"
    meta = yaml.safe_load(text.split("---\n")[1])
    assert meta["title"]
    assert 30 <= len(" ".join(meta["description"].split())) <= 200


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_everything_on_the_page_renders(page, pretend_verified, monkeypatch):
    monkeypatch.delenv("XTRAIN_DOCS_DRAFT", raising=False)
    body = page.read_text().split("---\n", 2)[2]
    out = render(body)
    assert "--8<--" not in out
    assert "wzxhzdk" not in out
    assert "{{" not in out or "<code>" in out
    for inside in CONTROL.findall(out):
        assert "tabindex" not in inside, "one control within another"


@pytest.fixture(scope="module")
def marked():
    return marked_tests(config.ROOT / "tests", config.ROOT)


@pytest.mark.parametrize("reference", EMBEDDED)
def test_every_embedded_symbol_is_named_by_a_test(reference, marked):
    key = symbols.resolve(reference).key
    assert marked.get(key), f"no test is marked verifies({key!r})"


def test_a_symbol_without_a_test_is_found(toy):
    toy.write("docs/en/a.md", '```py\n--8<-- "toy.ring:ring"\n```\n')
    assert list(authored.embedded()) == ["toy.ring:ring"]
    assert not marked_tests(toy.root / "tests", toy.root).get("toy.ring:ring")
    toy.write(
        "tests/test_ring.py",
        'import pytest\n\n\n@pytest.mark.verifies("toy.ring:ring")\n'
        "def test_ring():\n    pass\n",
    )
    assert marked_tests(toy.root / "tests", toy.root)["toy.ring:ring"]


def test_pages_are_rendered_here_as_on_the_site():
    """The extensions of these tests are those of mkdocs.yml."""

    listed = site_settings()["markdown_extensions"]
    names = [next(iter(e)) if isinstance(e, dict) else e for e in listed]
    assert names == EXTENSIONS


def test_generated_pages_are_not_committed():
    ignored = (config.ROOT / "docs/en/.gitignore").read_text().split()
    for folder in ("/reference/", "/verification/ledger.md", "/verification/ledger/"):
        assert folder in ignored


def test_source_lines_fit_the_page():
    """84 columns are what fits beside both sidebars."""
    long = [
        f"{key}: {len(line)} columns: {line.strip()}"
        for key in EMBEDDED
        for line in symbols.resolve(key).source.splitlines()
        if len(line) > 88
    ]
    assert long == []


def test_the_repository_root_is_right():
    assert (config.ROOT / "mkdocs.yml").is_file()
    assert Path(config.ROOT / "src/xtrain").is_dir()
