"""The index of the search: what of a page is in it, and how pages are ordered."""

import json
from types import SimpleNamespace

import pytest

from xtrain_docs.search import index
from xtrain_docs.search.sections import Section, sections


def only(html: str) -> Section:
    (found,) = sections(html)
    return found


def test_headings_cut_a_page():
    found = sections(
        '<h1 id="ring">Ring<a class="headerlink" href="#ring">&para;</a></h1>'
        "<p>One.</p>"
        '<h2 id="time">The <code>time</code></h2><p>Two &amp; <em>three</em>.</p>'
        "<h4>Small</h4><p>Four.</p>"
    )
    assert found == [
        Section("ring", "Ring", "One."),
        Section("time", "The time", "Two & three. Small Four."),
    ]


@pytest.mark.parametrize(
    "left_out",
    [
        "<svg><text>0</text><text>d1</text></svg>",
        "<math><mi>N</mi></math>",
        "<details data-search-exclude><summary>file</summary><p>x</p></details>",
        "<script>run()</script>",
        "<style>a{color:red}</style>",
        "<pre><code>x = 1</code></pre>",
        '<p class="xt-verified">Verified by 5 tests</p>',
    ],
)
def test_figures_formulas_and_listings_are_left_out(left_out):
    html = f'<h2 id="a">A</h2><p>before</p>{left_out}<p>after</p>'
    assert only(html).text == "before after"


def test_names_that_a_listing_defines_are_kept():
    code = "class <b>Ring</b>:\n    def send_right(self): ...\n\nring = Ring()\n"
    found = only(f'<h2 id="a">A</h2><pre>{code}</pre>')
    assert found.names == ["Ring", "send_right"]
    assert found.text == ""


def test_cells_of_a_table_stay_apart_and_numbers_go():
    row = "<tr><td>stage</td><td>3</td><td>none</td></tr>"
    found = only(f'<h2 id="a">A</h2><table>{row}{row}</table><p>end</p>')
    assert found.text == "stage \u00b7 none \u00b7 end"


def test_a_question_that_folds_is_found_at_the_heading_above_it():
    question = '<details class="question"><summary>Why?</summary><p>So.</p></details>'
    found = sections(f'<h2 id="why">Reasons</h2>{question}')
    assert found == [Section("why", "Reasons"), Section("why", "Why?", "So.")]


def test_the_beginning_of_a_text_is_kept_and_new_words_of_its_rest():
    had: set[str] = set()
    head, rest = index.halves("a ring sends its cells, then cells arrive", 19, had)
    assert head == "a ring sends its"
    assert rest == ["cells", "then", "arrive"]
    assert index.halves("then more", 4, had) == ("then", ["more"])


def test_words_that_many_pages_have_tell_nothing():
    pages = [
        index.entry(
            f"{i}/", "T", "", [], [Section("a", "A", f"{'x' * 199} often only{i}x")]
        )
        for i in range(20)
    ]
    rests = [page["sections"][0][4] for page in index.without_common(pages)]
    assert rests == [f"only{i}x" for i in range(20)]


def test_anchors_that_follow_from_titles_are_left_out():
    anchors = [
        "page",
        "x.ring",
        "x.ring.f",
        "x.ring.f.g",
        "x.tree",
        "x.tree.f",
        "",
        "a",
    ]
    titles = ["Page", "x.ring", "f", "g", "x.tree", "f", "", "f"]
    sections = [[a, t, "words"] for a, t in zip(anchors, titles, strict=True)]
    made = list(index.shortened(sections))
    assert [a for a, *_ in made] == ["page", "=", ".", "x.ring.f.g", "=", ".", "", "a"]
    assert [rest for _, *rest in made] == [rest for _, *rest in sections]


def test_questions_of_another_page_are_a_heading_on_a_lecture():
    found = [Section("interview", "Interview questions", "Why a ring? Why a tree?")]
    page = index.entry("lc1-communication/", "T", "", [], found)
    assert page["sections"] == [["interview", "Interview questions", "", "", ""]]
    page = index.entry("interview/", "T", "", [], found)
    assert page["sections"][0][3] == "Why a ring? Why a tree?"


def test_every_kind_of_page_has_its_room():
    rooms = {
        "": "lectures", "lc3-zero/stage-3/": "lectures", "model/": "lectures",
        "planning/": "planning", "interview/lc1/": "interview",
        "bugs/lc1/": "bugs", "errata/lc1/": "evidence", "reference/comm/": "reference",
    }  # fmt: skip
    assert {at: index.ROOMS[index.room(at)].name for at in rooms} == rooms
    order = ["lectures", "interview", "bugs", "reference"]
    weights = [next(r.weight for r in index.ROOMS if r.name == name) for name in order]
    assert weights == sorted(set(weights), reverse=True)


def test_of_the_reference_the_first_sentence_is_kept():
    found = [Section("x.f", "f", "Sends a tensor. Parameters: many.")]
    page = index.entry("reference/comm/", "xtrain.comm", "", [], found)
    assert page["sections"] == [["x.f", "f", "", "Sends a tensor.", ""]]


@pytest.mark.parametrize("text", ["Bases: Module", "A rule: x.", "Taught in Ring."])
def test_of_the_reference_what_describes_nothing_is_left_out(text):
    page = index.entry("reference/comm/", "t", "", [], [Section("x.f", "f", text)])
    assert page["sections"] == [["x.f", "f", "", "", ""]]


def test_synonyms_say_what_pages_say():
    """A phrase that is its own synonym, or has none, would change nothing."""
    table = json.loads(index.SYNONYMS.read_text())
    assert list(table) == sorted(table)
    for phrase, others in table.items():
        assert phrase == phrase.lower(), phrase
        assert others, phrase
        assert phrase not in others, phrase


def test_the_index_takes_the_pages_that_may_be_searched(tmp_path):
    made = index.SearchIndex()
    group = SimpleNamespace(title="3 \u00b7 ZeRO")
    for url, meta in [("a/", {"title": "A", "description": "About."}),
                      ("b/", {"search": {"exclude": True}})]:  # fmt: skip
        page = SimpleNamespace(
            url=url, meta=meta, title="Short", ancestors=[group],
            content='<h1 id="a">A</h1><p>Words.</p>',
        )  # fmt: skip
        made.on_page_context({}, page=page)
    (tmp_path / "search").mkdir()
    made.on_post_build(config=SimpleNamespace(site_dir=str(tmp_path)))
    written = json.loads((tmp_path / "search/search_index.json").read_text())
    (page,) = written["docs"]["pages"]
    assert page == {
        "at": "a/", "title": "A", "about": "About.",
        "trail": ["3 \u00b7 ZeRO", "Short"],
        "room": 0, "sections": [["a", "A", "", "Words.", ""]],
    }  # fmt: skip
    assert written["config"]["separator"]
