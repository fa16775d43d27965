"""A page of the gallery has one fold a bug, with the symptom as its title."""

from markdown import Markdown

from xtrain_docs import config
from xtrain_docs.gallery import GalleryTreeprocessor
from xtrain_docs.tables.symptoms import ROW

PAGE = """
# Gallery

| bug | what you see | what shows it for sure |
|---|---|---|
| [All send](#b01) | it *hangs* | every rank's `stack` |
| [Rank 0 first](#b02) | slow | counting rounds |

Words.

## All send {#b01}

**Why.** A circle.

### Rank 0 first {#b02}

A chain.

## Sources {#sources}

None.
"""


def rendered(text: str) -> str:
    md = Markdown(extensions=["tables", "attr_list", "toc"])
    md.treeprocessors.register(GalleryTreeprocessor(md), "gallery", 4)
    return md.convert(text)


def test_each_bug_is_a_fold_with_its_symptom_and_sure_sign():
    page = rendered(PAGE)
    assert "<table>" not in page
    first, second = page.split("<details")[1:]
    assert first.startswith(' class="bug"><summary><h2 id="b01">')
    assert '<span class="xt-symptom">It <em>hangs</em></span>' in first
    assert '<span class="xt-cause">All send</span>' in first
    assert "<strong>A sure sign:</strong> every rank's <code>stack</code>" in first
    assert "A circle." in first and "A chain." in second
    assert second.index("</details>") < second.index("Sources") < second.index("None.")


def test_other_tables_stay():
    text = PAGE.replace("| bug |", "| name |")
    assert "<table>" in rendered(text) and "<details" not in rendered(text)


def test_every_row_of_the_pages_leads_to_a_heading_of_its_page():
    for page in sorted((config.PAGES / "bugs").glob("*.md")):
        text = page.read_text()
        rows = [ROW.match(line) for line in text.splitlines()]
        anchors = [row[2] for row in rows if row]
        assert len(anchors) >= 10, page
        assert [a for a in anchors if f"{{#{a}}}" not in text] == [], page
