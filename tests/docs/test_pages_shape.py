"""Lecture pages have one shape: a lead, all parts, words between blocks of code."""

import re
from itertools import pairwise

import pytest

from xtrain_docs import blocks, config, fences

LECTURES = sorted(
    page.parent for page in config.PAGES.glob("lc*/index.md") if page.parent.is_dir()
)
PAGES = [page for lecture in LECTURES for page in sorted(lecture.glob("*.md"))]
FIRST = [page for page in PAGES if page.parent.name.startswith("lc1")]
NAMES = {page: f"{page.parent.name}/{page.stem}" for page in PAGES}


def body(text: str) -> list[str]:
    """The lines below the front matter."""
    return text.split("---\n", 2)[2].splitlines()


# ------------------------------------------------------- words between the blocks


def shows_code(fence: fences.Fence) -> bool:
    """Is it code, an output or a command? Figures and tables bring their own words."""
    return fence.info.split(" ")[0] not in blocks.KINDS


def transcript_of(fence: fences.Fence, before: fences.Fence) -> bool:
    """Is this the output of the snippet before it? The two belong together."""
    return "".join(fence.body[:1]).replace(".out", ".py") == "".join(before.body[:1])


def without_words(text: str) -> list[str]:
    """Blocks of code that follow another one with nothing said in between."""
    lines = body(text)
    problems = []
    for before, fence in pairwise(fences.fences(lines)):
        between = lines[before.end + 1 : fence.start]
        said = [
            line for line in between if re.search(r"^\W*\w", line) and line[0] != "#"
        ]
        if not (shows_code(before) and shows_code(fence)) or said:
            continue
        if not transcript_of(fence, before):
            problems.append(f"{''.join(fence.body[:1])} after {before.body[0]}")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_a_sentence_stands_between_two_blocks_of_code(page):
    assert without_words(page.read_text()) == []


TOY = """---
title: a
---
```py
--8<-- "a:one"
```
{between}
```py
--8<-- "a:two"
```
"""


def test_two_blocks_without_a_word_between_them_are_found():
    assert len(without_words(TOY.format(between=""))) == 1
    assert len(without_words(TOY.format(between="\n## The other half\n"))) == 1
    assert without_words(TOY.format(between="\nThe other half.\n")) == []


def test_a_transcript_may_follow_its_own_snippet_only():
    snippet = TOY.replace("a:one", "snippets/a.py").format(between="")
    assert without_words(snippet.replace("a:two", "snippets/a.out")) == []
    assert len(without_words(snippet.replace("a:two", "snippets/b.out"))) == 1


# ------------------------------------------------------------------------ the lead


def lead(text: str) -> list[str]:
    """The paragraphs between the page's title and its first heading or block."""
    lines = body(text)
    start = next(i for i, line in enumerate(lines) if line.startswith("# ")) + 1
    rest = iter(lines[start:])
    found = [[]]
    for line in rest:
        if line.startswith(("#", "```", "|", "!!!", "???")):
            break
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [" ".join(paragraph) for paragraph in found if paragraph]


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_a_page_begins_with_a_short_lead(page):
    paragraphs = lead(page.read_text())
    assert paragraphs, "say what it is, when it is used and what it costs"
    words = len(paragraphs[0].split())
    assert 12 <= words <= 90, f"{words} words"


def test_a_page_without_a_lead_is_found():
    assert lead("---\ntitle: a\n---\n\n# A\n\n## B\n\ntext\n") == []
    assert lead("---\ntitle: a\n---\n\n# A\n\nOne.\nTwo.\n\n## B\n") == ["One. Two."]


# ------------------------------------------------------------------- the lecture's map


def in_nav(folder: str) -> list[str]:
    """The pages of a lecture that the navigation lists, in its order."""
    text = (config.ROOT / "mkdocs.yml").read_text()
    nav = text[text.index("\nnav:") :]
    pages = re.findall(rf"\b{folder}/([\w-]+\.md)", nav)
    return [page for page in dict.fromkeys(pages) if page != "index.md"]


@pytest.mark.parametrize("lecture", LECTURES, ids=lambda folder: folder.name)
def test_the_map_of_a_lecture_lists_every_page_of_it(lecture):
    listed = in_nav(lecture.name)
    assert set(listed) == {page.name for page in lecture.glob("*.md")} - {"index.md"}
    links = re.findall(r"\]\(([\w-]+\.md)", (lecture / "index.md").read_text())
    assert [page for page in listed if page not in links] == []


# --------------------------------------------------------------- the parts of a page

PARTS = ("idea", "code", "run", "measured", "wrong", "interview", "race", "sources")

# Down to the wire: walks through one piece of software, not a concept each.
TOURS = (
    "faults-and-safety",
    "shared-memory",
    "sockets-to-backend",
    "use-the-backends",
    "why-nccl-is-faster",
    "will-it-run-on-nccl",
)
WITHOUT_BUG = ("one-shot", "ring-or-tree", "two-halves", "ledger", "two-backends")

WHITEBOARD = {
    "point-to-point": "exchange",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all-gather": "ring_all_gather",
    "reduce-scatter": "ring_reduce_scatter",
    "all-to-all": "all_to_all_single",
    "parameter-server": "parameter_server_all_reduce",
    "ring-all-reduce": "ring_all_reduce",
    "tree-all-reduce": "tree_all_reduce",
    "halving-doubling": "halving_doubling_all_reduce",
    "one-shot": "one_shot_all_reduce",
    "hierarchical": "hierarchical_all_reduce",
}
FORMS_ON = {
    **{f"lc1-communication/{p}": [f"comm/{form}"] for p, form in WHITEBOARD.items()},
    "lc2-data-parallel/naive-data-parallel": ["data_parallel/naive_data_parallel"],
    "lc2-data-parallel/distributed-sampler": ["data_parallel/distributed_sampler"],
    "lc2-data-parallel/buckets-and-overlap": [
        "data_parallel/distributed_data_parallel"
    ],
    "lc3-zero/adam": ["zero/adamw"],
    "lc3-zero/mixed-precision": ["zero/mixed_precision"],
    "lc3-zero/stage-1-and-2": ["zero/zero_1", "zero/zero_2"],
    "lc3-zero/stage-3": ["zero/fully_sharded", "zero/fully_sharded_prefetch"],
    "lc3-zero/clipping": ["zero/clip_grad_norm"],
    "lc3-zero/muon": ["zero/muon"],
    "lc4-tensor-parallel/overlap": [
        "tensor_parallel/ring_all_gather_matmul",
        "tensor_parallel/ring_matmul_reduce_scatter",
    ],
    "lc7-expert-parallel/placement": ["expert_parallel/plan_placement"],
    "lc1-communication/gather-and-scatter": ["comm/gather", "comm/scatter"],
    "lc5-pipeline-parallel/chimera": ["schedules/chimera"],
    "lc5-pipeline-parallel/dualpipe-v": ["schedules/dualpipe_v"],
    "lc5-pipeline-parallel/zb-v": ["schedules/zb_v"],
    "lc5-pipeline-parallel/zero-bubble": ["schedules/zb_h1", "schedules/zb_h2"],
}
WITHOUT = {
    "against-torch": {"picture", "idea", "race"},
    "training-script": {"picture", "idea", "run", "measured"},
    "traffic": {"race"},
    "vocabulary": {"run", "race"},
}
"""What pages of lc2 and lc3 lack that compare, or put all parts together."""


def headings(text: str) -> list[str]:
    """The names of a page's parts, in order."""
    return re.findall(r"^#{2,3} .*\{#([\w-]+)\}$", text, re.MULTILINE)


@pytest.mark.parametrize("page", FIRST, ids=NAMES.get)
def test_a_page_has_all_its_parts(page):
    text = page.read_text()
    found = headings(text)
    if page.stem == "index":
        assert {"words", "map", "cost", "hardware", "nccl", "reading"} <= set(found)
        return
    if page.stem in TOURS:
        assert "sources" in found
        return
    assert set(found) & {"messages", "picture"}
    missing = [part for part in PARTS if part not in found]
    if page.stem == "store-and-objects":  # two concepts, each with its own idea
        missing = [part for part in missing if part not in ("idea", "code")]
    assert missing == []
    assert "snippets/lc1/" in text
    assert "interview/lc1.md#q" in text
    assert "bugs/lc1.md#b" in text or page.stem in WITHOUT_BUG


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_a_page_of_lectures_2_and_3_has_all_its_parts(page):
    if page.parent.name[:3] in ("lc2", "lc3") and page.stem != "index":
        found = set(headings(page.read_text()))
        found |= {"picture"} if "messages" in found else set()
        assert {"picture", *PARTS} - found == WITHOUT.get(page.stem, set())


@pytest.mark.parametrize("page", sorted(FORMS_ON))
def test_the_whiteboard_form_stands_whole_before_the_library_form(page):
    text = (config.PAGES / f"{page}.md").read_text()
    for form in FORMS_ON[page]:
        assert f'```\n--8<-- "src/xtrain/whiteboard/{form}.py"\n```' in text
    order = ("idea", "whiteboard", "run", "code", "measured", "wrong")
    found = [part for part in headings(text) if part in order]
    assert found == list(order)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_what_is_misread_stands_under_a_heading_of_its_own(page):
    assert "Often misread" not in page.read_text()


# ------------------------------------------------------------------------- figures

PHONE = 400
"""The widest drawing that a phone of 390 pixels shows in letters of 10 pixels."""


@pytest.mark.parametrize("page", FIRST, ids=NAMES.get)
def test_figures_of_a_page_fit_a_phone(page):
    for fence in fences.fences(page.read_text().splitlines()):
        asked = blocks.parse_info(fence.info)
        if not asked or asked[0] != "figure":
            continue
        drawing = blocks.registry("figure").run(asked[1], asked[2])
        width = int(re.search(r'viewBox="0 0 (\d+) ', drawing)[1])
        assert width <= PHONE, fence.info
        assert f"min-width:{round(0.8 * width)}px" in drawing, fence.info
