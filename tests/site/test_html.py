"""The built pages as files: links, anchors, nothing from elsewhere."""

import html
import re
from pathlib import Path

import pytest

from tests.site.conftest import SITE
from xtrain_docs import (
    authored,
    config,
    evidence_links,
    guards,
    reference_pages,
    symbols,
)


def test_no_dead_link_or_anchor():
    assert guards.dead_links(SITE) == []


def test_nothing_is_loaded_from_elsewhere():
    assert guards.third_parties(SITE) == []


def test_styles_and_scripts_name_no_other_host():
    for path in [
        *(SITE / "en/assets").rglob("*.css"),
        *SITE.glob("en/assets/xtrain*.js"),
    ]:
        hosts = re.findall(r"url\(\s*[\"']?(https?:)?//", path.read_text())
        assert not hosts, path


def test_every_page_has_title_description_and_language():
    for path in (SITE / "en").rglob("*.html"):
        text = path.read_text()
        assert '<html lang="en"' in text, path
        assert re.search(r'<meta name="description" content="[^"]{20,}', text), path
        assert re.search(r"<title>[^<]+</title>", text), path


def test_no_leftovers_of_markdown_or_templates():
    for path in (SITE / "en").rglob("*.html"):
        relative = path.relative_to(SITE / "en").as_posix()
        text = re.sub(
            r"<(code|pre|math|script|style)\b.*?</\1>", "", path.read_text(), flags=re.S
        )
        for leftover in ("--8<--", "wzxhzdk", "{{", "}}", "{ .xt-", "```"):
            assert leftover not in text, f"{relative}: {leftover}"


@pytest.mark.parametrize("part", ["index.html", "404.html", "en/sitemap.xml"])
def test_parts_around_the_pages(part):
    assert (SITE / part).is_file()


ADDRESSES = """
benchmarks benchmarks/backends benchmarks/lc1 benchmarks/lc2 benchmarks/lc3
benchmarks/lc4 bugs/lc4 errata/lc4 interview/lc4
bugs/lc1 bugs/lc2 bugs/lc3 errata/lc1 errata/lc2 errata/lc3
interview/lc1 interview/lc2 interview/lc3 labs/ring_by_hand model support-matrix
verification verification/ledger reference reference/comm
lc1-communication lc1-communication/all-gather lc1-communication/all-to-all
lc1-communication/bad-input lc1-communication/broadcast lc1-communication/deadlocks
lc1-communication/faults-and-safety lc1-communication/gather-and-scatter
lc1-communication/groups-and-meshes lc1-communication/halving-doubling
lc1-communication/hierarchical lc1-communication/ledger lc1-communication/one-shot
lc1-communication/parameter-server lc1-communication/point-to-point
lc1-communication/process-groups lc1-communication/reduce
lc1-communication/reduce-scatter lc1-communication/ring-all-reduce
lc1-communication/ring-or-tree lc1-communication/shared-memory
lc1-communication/sockets-to-backend lc1-communication/store-and-objects
lc1-communication/sync-and-async lc1-communication/tree-all-reduce
lc1-communication/two-halves lc1-communication/use-the-backends
lc1-communication/why-nccl-is-faster
lc2-data-parallel lc2-data-parallel/accumulation lc2-data-parallel/against-torch
lc2-data-parallel/buckets-and-overlap lc2-data-parallel/deep-mlp
lc2-data-parallel/distributed-sampler lc2-data-parallel/naive-data-parallel
lc2-data-parallel/reduce-gradients lc2-data-parallel/training-script
lc2-data-parallel/uneven-batches lc2-data-parallel/unused-parameters
lc3-zero lc3-zero/adam lc3-zero/checkpoints lc3-zero/clipping lc3-zero/flat-shards
lc3-zero/mixed-precision lc3-zero/stage-1-and-2 lc3-zero/stage-3 lc3-zero/traffic
lc3-zero/vocabulary
lc4-tensor-parallel lc4-tensor-parallel/attention lc4-tensor-parallel/checkpoints
lc4-tensor-parallel/conjugate-operators lc4-tensor-parallel/cross-entropy
lc4-tensor-parallel/embedding lc4-tensor-parallel/hugging-face
lc4-tensor-parallel/linear lc4-tensor-parallel/mlp lc4-tensor-parallel/overlap
lc4-tensor-parallel/sequence-parallel lc4-tensor-parallel/when-it-pays
lc4-tensor-parallel/whole-model
lc5-pipeline-parallel lc5-pipeline-parallel/chimera lc5-pipeline-parallel/dualpipe
lc5-pipeline-parallel/dualpipe-v lc5-pipeline-parallel/gpipe
lc5-pipeline-parallel/interleaved lc5-pipeline-parallel/one-f-one-b
lc5-pipeline-parallel/passes lc5-pipeline-parallel/zb-v
lc5-pipeline-parallel/zero-bubble
planning planning/layout-planner planning/memory-calculator planning/pipeline-explorer
planning/rules-of-thumb planning/what-each-cuts planning/memory-math
planning/communication-math planning/compute-math
labs/fit_70b labs/ring_or_tree labs/where_do_112_gb_go
"""


@pytest.mark.parametrize("address", ADDRESSES.split())
def test_an_address_that_was_published_stays(address):
    assert (SITE / "en" / address / "index.html").is_file()


def test_pages_are_those_people_write_and_one_a_room():
    built = {p.parent.relative_to(SITE / "en") for p in SITE.rglob("en/**/index.html")}
    written = [*authored.pages(), *config.PAGES.glob("labs/*.py")]
    addresses = {p.relative_to(config.PAGES).with_suffix("") for p in written}
    expected = {p.parent if p.name == "index" else p for p in addresses}
    expected |= {Path("reference", room) for room in reference_pages.rooms()}
    ledger = Path("verification/ledger")
    rooms = {path.stem for path in (config.PAGES / ledger).glob("*.md")}
    assert {"comm", "zero"} < rooms
    expected |= {ledger / room for room in rooms}
    assert built == expected | {Path("reference"), ledger}


def test_the_site_is_light():
    """It weighed 40 MB when this was written, a third of them Pyodide."""
    assert sum(p.stat().st_size for p in SITE.rglob("*") if p.is_file()) <= 45e6


def test_every_public_symbol_that_a_page_shows_has_its_place_in_the_reference():
    rooms = {
        path.parent.name: set(re.findall(r' id="([^"]+)"', path.read_text()))
        for path in SITE.glob("en/reference/*/index.html")
    }
    shown = [key for key in authored.embedded() if "._" not in key.replace(":", ".")]
    ours = [key for key in shown if key.startswith("xtrain.")]
    assert len(ours) > 200
    for key in ours:
        symbol = symbols.resolve(key)
        assert symbol.entry in rooms[symbol.module.split(".")[1]], key


def test_code_that_a_page_names_opens_in_it():
    """Each link to a test, a symbol or a file leads to a block with its code."""
    blocks = 0
    for page in authored.pages():
        named = {m.groups() for m in evidence_links.LINK.finditer(page.read_text())}
        if not named:
            continue
        address = page.relative_to(config.PAGES).with_suffix("")
        address = address.parent if address.name == "index" else address
        text = (SITE / "en" / address / "index.html").read_text()
        for kind, target in named:
            place = evidence_links.evidence_place(kind, target)
            start = text.index(f'id="{place.id}"')
            code = text[start : text.index("</details>", start)]
            first = place.code().splitlines()[0]
            assert first in html.unescape(re.sub(r"<[^>]+>", "", code)), target
            assert f'href="#{place.id}"' in text
            blocks += 1
    assert blocks > 800


def test_a_page_asks_for_one_style_sheet_and_blocks_on_no_script():
    for path in (SITE / "en").rglob("*.html"):
        text = path.read_text()
        assert len(re.findall(r'<link rel="stylesheet"', text)) == 1, path
        scripts = re.findall(r'<script[^>]* src="[^"][^>]*>', text)
        assert scripts, path
        assert all(" defer" in script for script in scripts), path


def test_every_file_that_a_style_sheet_names_is_there():
    for path in filter(Path.is_file, SITE.rglob("*.css")):
        for name in re.findall(r"url\([\"']?(?!data:|#)([^\"')]+)", path.read_text()):
            assert (path.parent / name).is_file(), f"{path.name}: {name}"
