"""Every guard catches a planted defect, and lets through what is in order."""

import pytest

from xtrain_docs import guards


@pytest.mark.parametrize(
    "fence",
    ["```py\nx = 1\n```", "```python\nx = 1\n```", "~~~py\nx = 1\n~~~",
     "1.  a\n\n    ```py\n    x = 1\n    ```", "```{.py .pseudo}\nx = 1\n```",
     '!!! note\n\n    ```py title="a"\n    x = 1\n    ```', "```pycon\n>>> 1\n```"],
)  # fmt: skip
def test_typed_python_is_found(fence):
    (problem,) = guards.typed_code(f"# T\n\n{fence}\n")
    assert "typed Python" in problem


@pytest.mark.parametrize(
    "fence",
    ['```py\n--8<-- "a.b:c"\n```', "```text\nx = 1\n```",
     "````md\n```py\nx\n```\n````"],
)  # fmt: skip
def test_embeds_and_other_fences_are_in_order(fence):
    assert guards.typed_code(f"# T\n\n{fence}\n") == []


@pytest.mark.parametrize(
    "words",
    ["It sends 1.5 MB.", "It takes 12 ms.", "It is 4x faster.", "About 37 %.",
     "64 MiB of payload", "a 400 GB/s link", "1.75× more", "24 bytes in all",
     "| a | 3.2 GiB |", "- 10 us", "??? note \"takes 5 s\"", "37% less"],
)  # fmt: skip
def test_typed_numbers_are_found(words):
    assert guards.typed_numbers(f"# T\n\n{words}\n")


@pytest.mark.parametrize(
    "words",
    ["It sends {{ 3 * MiB | bytes }}.", "[1.5 MB]{.cited}, says the paper",
     "a link of [50 GB/s]{ .given }", "4 ranks and 6 steps", "`sleep 5 s`",
     "$t = 5 s$", "$$\n5 s\n$$", "> it took 5 ms, they say", "each of 4 bytes",
     '??? question "What does 1 GB cost at 100 GB/s?"', "fp16 and 2x2 grids",
     "```text\n24 bytes\n```", "---\na: 5 ms\n---\ntext", "[x](a-5-ms.md)",
     "in 2009", "section 3.2", "torch 2.13", "rank 3 sends"],
)  # fmt: skip
def test_computed_marked_and_plain_numbers_are_in_order(words):
    text = words if words.startswith("---") else f"# T\n\n{words}\n"
    assert guards.typed_numbers(text) == []


@pytest.fixture
def site(tmp_path):
    """Two pages that link to each other."""
    (tmp_path / "en/a").mkdir(parents=True)
    (tmp_path / "en/index.html").write_text(
        '<h1 id="top">x</h1><a href="a/#there">a</a><a href="#top">t</a>'
        '<a href="https://example.org/">out</a><link rel="stylesheet" href="s.css">'
    )
    (tmp_path / "en/s.css").write_text("")
    (tmp_path / "en/a/index.html").write_text(
        '<h2 id="there">y</h2><a href="../">up</a><a href="/en/a/">me</a>'
        '<a href="data:text/plain,x">d</a>'
    )
    return tmp_path


def test_living_links_are_in_order(site):
    assert guards.dead_links(site) == []
    assert guards.third_parties(site) == []


@pytest.mark.parametrize(
    "link", ["gone/", "a/#gone", "#gone", "/en/gone/", "a/gone.png", "../en/a/#gone"]
)
def test_dead_links_are_found(site, link):
    page = site / "en/index.html"
    page.write_text(page.read_text() + f'<a href="{link}">x</a>')
    (problem,) = guards.dead_links(site)
    assert link in problem


@pytest.mark.parametrize(
    "tag",
    ['<script src="https://cdn.example/x.js"></script>',
     '<link rel="stylesheet" href="//fonts.example/x.css">',
     '<img src="https://img.example/x.png">'],
)  # fmt: skip
def test_third_parties_are_found(site, tag):
    page = site / "en/index.html"
    page.write_text(page.read_text() + tag)
    assert len(guards.third_parties(site)) == 1
