"""Building and serving: stop on a defect, publish only what is whole."""

import gzip
import http.client
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from html import unescape
from pathlib import Path

import pytest
from mkdocs.exceptions import Abort

from tests.docs.rendering import render
from xtrain_docs import (
    build,
    ledger_page,
    prebuild,
    reference_pages,
    serve,
    transcripts,
    values,
    verification,
)
from xtrain_docs.symbols import SymbolError

ROOT = Path(__file__).parents[2]

MKDOCS = """
site_name: toy
site_url: http://127.0.0.1/en/
docs_dir: docs/en
theme: {name: mkdocs, highlightjs: false}
plugins: [autorefs]
strict: %s
validation: {absolute_links: relative_to_docs}
markdown_extensions: [attr_list, pymdownx.superfences, xtrain_docs.extension]
"""


@pytest.fixture
def site(toy, monkeypatch):
    """The toy repository as a site of one page; build(text) builds it."""
    monkeypatch.setattr(prebuild, "main", lambda: None)
    monkeypatch.setattr(build, "main_config", lambda: toy.root / "mkdocs.yml")
    toy.write(
        "docs/en/verification/ledger/ring.md",
        "# L\n\n<a id=verified-toy.ring._hidden>",
    )
    target = toy.root / "build/site"

    def make(text: str, strict: bool = True):
        toy.write("mkdocs.yml", MKDOCS % str(strict).lower())
        toy.write("docs/en/index.md", text)
        build.build(target)
        return (target / "en/index.html").read_text()

    make.target = target
    return make


EMBED = '# T\n\n```py\n--8<-- "toy.ring:%s"\n```\n'


def test_a_good_page_is_published_with_its_root_and_404(toy, site):
    toy.record("toy.ring:_hidden")
    assert "Verified by 2 tests" in site(EMBED % "_hidden")
    assert 'href="en/"' in (site.target / "index.html").read_text()
    assert (site.target / "404.html").is_file()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (EMBED % "gone", SymbolError),
        (EMBED % "_hidden", verification.UnverifiedError),
        ("# T\n\n{{ gone }}\n", ValueError),
        ("# T\n\n$\\gone$\n", ValueError),
        ("# T\n\n```figure gone\n```\n", ValueError),
    ],
    ids=["symbol", "unverified", "value", "math", "figure"],
)
def test_a_defect_of_a_page_is_an_error(toy, text, error):
    with pytest.raises(error):
        render(text)


def test_a_defect_stops_the_build_and_leaves_the_old_site(toy, site):
    """What a page raises stops it, strict or not; a warning does when it is strict."""
    site("# Old\n\n[x](#gone)\n")  # of a link within a page, MkDocs says nothing
    for strict in (True, False):
        with pytest.raises(SymbolError, match="has no 'gone'"):
            site(EMBED % "gone", strict=strict)
    with pytest.raises(Abort):
        site("# T\n\n[x](gone.md)\n")
    assert "Old" in (site.target / "en/index.html").read_text()


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("https://example.org/x", "https://example.org/x/en/"),
        ("https://example.org/x/en/", "https://example.org/x/en/"),
        ("", None),
    ],
)
def test_the_address_is_that_of_the_root(monkeypatch, given, used):
    monkeypatch.setenv("XTRAIN_SITE_URL", given)
    build._site_address()
    assert os.environ.get("XTRAIN_SITE_URL") == used


# --- prebuild -------------------------------------------------------------------------


def test_each_room_has_one_reference_page_with_its_code(toy, monkeypatch):
    toy.write("src/xtrain/__init__.py", "")
    toy.write("src/xtrain/cli.py", "def main():\n    return 0\n")
    toy.write("src/xtrain/comm/__init__.py", "")
    toy.write("src/xtrain/comm/ring.py", 'X = "$a$ {{ b }} [c](test:d) <i>"\n')
    toy.write("src/xtrain/comm/tree.py", '"""A tree."""\n\nY = 1\n')
    old = toy.write("docs/en/reference/comm/ring.md", "of an earlier build")
    assert reference_pages.write_reference() == 3
    folder = toy.root / "docs/en/reference"
    made = {file.name for file in folder.rglob("*.md")}
    assert made == {"index.md", "comm.md", "xtrain.md"}
    assert not old.exists()
    page = (folder / "comm.md").read_text()
    for module in ("xtrain.comm.ring", "xtrain.comm.tree"):
        assert f"{{ #{module} }}" in page
        assert f"::: {module}\n" in page
        assert f"](comm.md#{module})" in (folder / "index.md").read_text()
    assert "A tree" in (folder / "index.md").read_text()
    for acts in ("{{", "$a$", "[c]", "<i>"):
        assert acts not in page.split("::: ")[0]
    html = render(page.split("---\n", 2)[2])
    plain = unescape(re.sub(r"<[^>]+>", "", html))
    assert (toy.root / "src/xtrain/comm/ring.py").read_text() in plain
    assert "href" not in page
    monkeypatch.setenv("XTRAIN_REPO_URL", "https://example.org/x/")
    reference_pages.write_reference()
    file = "https://example.org/x/blob/main/src/xtrain/comm/tree.py#L1-L3"
    assert f'href="{file}"' in (folder / "comm.md").read_text()


@pytest.mark.parametrize("room", ["whiteboard", "practice", "comm"])
def test_files_that_stand_on_pages_and_machinery_are_not_in_the_reference(toy, room):
    toy.write("src/xtrain/__init__.py", "")
    toy.write(f"src/xtrain/{room}/__init__.py", "")
    toy.write(f"src/xtrain/{room}/ring.py", "def ring():\n    return 12345\n")
    reference_pages.write_reference()
    page = (toy.root / f"docs/en/reference/{room}.md").read_text()
    assert f"::: xtrain.{room}.ring\n" in page
    assert ("12345" in page) == ("exclude: true" not in page) == (room == "comm")


def test_a_module_of_the_reference_leads_to_the_pages_that_teach_it(toy):
    toy.record("toy.ring:ring")
    for name in ("lc1-toy/ring.md", "bugs/lc1.md"):
        toy.write(
            f"docs/en/{name}", '---\ntitle: "A ring: by hand"\n---\n' + EMBED % "ring"
        )
    assert reference_pages.taught_in() == {
        "toy.ring": [
            "Taught in [A ring: by hand](/lc1-toy/ring.md).", "{ .xt-taught }", ""
        ]
    }  # fmt: skip


@pytest.fixture
def ledger(toy):
    """Writes the ledger and reads it, the overview first."""

    def written() -> str:
        ledger_page.write_ledger()
        folder = toy.root / "docs/en/verification"
        pages = [folder / "ledger.md", *sorted(folder.glob("ledger/*.md"))]
        return "\n".join(page.read_text() for page in pages)

    return written


def test_the_ledger_lists_tests_and_says_what_is_not_verified(toy, ledger, monkeypatch):
    toy.record("toy.ring:ring")
    toy.write("docs/en/a.md", EMBED % "_hidden")
    text = ledger()
    assert "1 of 2 functions" in text
    assert "| 2 | gloo on cpu | 1, 4 |" in text
    assert "| `tests/test_ring.py::test_ring` | 2 |" in text
    assert "Not verified: no test names it" in text
    monkeypatch.setenv("XTRAIN_REPO_URL", "https://example.org/x")
    place, text = "https://example.org/x/blob/main/", ledger()
    assert f"[`tests/test_ring.py::test_ring`]({place}tests/test_ring.py#L2-L3)" in text
    assert f"[toy/ring.py:9]({place}src/toy/ring.py#L9-L16)" in text


def test_the_ledger_counts_what_ran_on_each_backend(toy, ledger):
    toy.record("toy.ring:ring")
    toy.record("toy.ring:ring", outcome="failed", backend="xtrain-shm")
    toy.record("toy.ring:ring", outcome="skipped", backend="xtrain-socket")
    rows = [line for line in ledger().splitlines() if "test_ring.py::test_ring" in line]
    assert len(rows) == 2  # what was skipped proves nothing
    assert rows[0].endswith("` | 2 | gloo on cpu | 1, 4 |")
    assert rows[1].endswith(" **fails** | 2 | xtrain-shm on cpu | 1, 4 |")


def test_the_ledger_says_which_worlds_shared_gpus_and_what_failed_there(toy, ledger):
    toy.record("toy.ring:ring")
    assert values.gpu_records() == "none so far"
    file = toy.root / "build/verification/gloo-cpu.json"
    store = verification.Store(file, toy.root)
    on = {"device": "cuda", "platform": "Linux, 1 x H200, NCCL 2.30.7", "gpus": 1,
          "backend": "nccl", "shared": [2, 4],
          "failed": ["tests/a.py::test_b"]}  # fmt: skip
    gpu = verification.Store(file.with_name("nccl-1-h200.json"), toy.root)
    gpu.write(store.read(), store.about() | on)
    text = ledger()
    assert "Linux, 1 x H200, NCCL 2.30.7: ranks of worlds of 2, 4 shared GPUs." in text
    assert "is not counted for it: `tests/a.py::test_b`." in text
    assert values.gpu_records() == "Linux, 1 x H200, NCCL 2.30.7"


def test_an_empty_ledger_says_how_to_fill_it(ledger):
    text = ledger()
    assert "No test run is recorded" in text
    assert "make test" in text


# --- serve ----------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path):
    (tmp_path / "index.html").write_text("home")
    (tmp_path / "404.html").write_text("lost")
    made = serve.server(tmp_path)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


def ask(address, **headers):
    """Status, headers and body of one answer, kept as it was sent."""
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as answer:
        return answer.code, answer.headers, answer.read()


@pytest.mark.parametrize(
    "path",
    [
        "/gone/",
        "/a%00b",
        "/" + "a" * 5000,
        "/assets/",  # a folder without an index
        "/outside/secret.txt",  # a link out of the site
        "/secret.txt",
        "/..%2f..%2fetc/passwd",
        "/ring",
    ],
)
def test_serves_nothing_but_the_files_of_the_site(address, tmp_path, path, capfd):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "hidden.js").write_text("")
    outside = tmp_path.with_name(tmp_path.name + "-outside")
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (tmp_path / "outside").symlink_to(outside)
    (tmp_path / "secret.txt").symlink_to(outside / "secret.txt")
    (tmp_path / "ring").symlink_to("ring")
    status, _, body = ask(address + path)
    assert (status, body) == (404, b"lost")
    assert capfd.readouterr().err == "", "no traceback"


def test_serves_pages_and_links_that_stay_inside(address, tmp_path):
    (tmp_path / "again.html").symlink_to("index.html")
    for path in ("", "/again.html"):
        assert ask(address + path)[2] == b"home"


@pytest.fixture
def packed(address, tmp_path):
    """A page long enough to travel compressed; the address of its folder."""
    (tmp_path / "index.html").write_text("words " * 1000)
    return address


@pytest.mark.parametrize("accepted", ["gzip", "br, gzip;q=0.5", "deflate, *"])
def test_a_browser_that_takes_gzip_gets_it(packed, accepted):
    status, headers, body = ask(packed, **{"Accept-Encoding": accepted})
    assert status == 200
    assert headers["Content-Encoding"] == "gzip"
    assert headers["Content-Type"] == "text/html"
    assert headers["Vary"] == "Accept-Encoding"
    assert int(headers["Content-Length"]) == len(body)
    assert gzip.decompress(body).decode() == "words " * 1000


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0", "gzip; q=0.0"])
def test_another_gets_the_text_itself(packed, accepted):
    _, headers, body = ask(packed, **{"Accept-Encoding": accepted})
    assert headers["Content-Encoding"] is None
    assert body.decode() == "words " * 1000


def test_what_a_browser_has_is_not_sent_again(packed, tmp_path):
    _, first, _ = ask(packed, **{"Accept-Encoding": "gzip"})
    assert first["Cache-Control"] == "no-cache", "it has to ask each time"
    again = {"Accept-Encoding": "gzip", "If-None-Match": first["ETag"]}
    status, headers, body = ask(packed, **again)
    assert (status, body) == (304, b"")
    assert headers["ETag"] == first["ETag"]
    (tmp_path / "index.html").write_text("others " * 1000)
    assert ask(packed, **again)[0] == 200
    assert ask(packed, **{"If-None-Match": first["ETag"]})[0] == 200, "not packed"


@pytest.mark.parametrize("name", ["short.html", "font.woff2"])
def test_what_is_short_or_packed_already_travels_as_it_is(address, tmp_path, name):
    (tmp_path / name).write_bytes(b"x" * (1000 if name[0] == "f" else 500))
    _, headers, body = ask(f"{address}/{name}", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] is None
    assert body == (tmp_path / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("site.0123abcd.css", "public, max-age=31536000, immutable"),
        ("xt-text-normal-0123abcd.woff2", "public, max-age=31536000, immutable"),
        ("search_index.json", "no-cache"),
        ("bundle.min.js", "no-cache"),
    ],
)
def test_what_is_named_by_its_content_is_kept_for_good(address, tmp_path, name, kept):
    (tmp_path / name).write_text("")
    assert ask(f"{address}/{name}")[1]["Cache-Control"] == kept


def test_many_requests_go_over_one_connection(address, tmp_path):
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "index.html").write_text("pages")
    link = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    seen = []
    for path in ("/", "/gone", "/en", "/en/", "/"):
        link.request("GET", path)
        answer = link.getresponse()
        seen.append((answer.status, answer.read()))
        port = link.sock.getsockname()[1] if link.sock else None
    assert [status for status, _ in seen] == [200, 404, 301, 200, 200]
    assert seen[3][1] == b"pages"
    assert port, "still open"
    link.close()


@pytest.mark.parametrize("how", [[], ["--check"]])
def test_a_taken_port_is_said_before_anything_is_built(
    address, capsys, tmp_path, monkeypatch, how
):
    monkeypatch.setattr(serve.config, "SITE", tmp_path / "not built")
    monkeypatch.setattr(serve.build, "main", lambda words: pytest.fail("builds"))
    port = address.rsplit(":", 1)[1]
    assert serve.main(["--port", port, *how]) == 1
    said = capsys.readouterr().err
    assert f"port {port} cannot be used (Address already in use)" in said
    assert "make site PORT=" in said
    assert "--port 8123); 0 takes any" in said
    assert serve.main(["--port", "70000", *how]) == 1


def test_a_free_port_is_only_looked_at(monkeypatch):
    monkeypatch.setattr(serve.build, "main", lambda words: pytest.fail("builds"))
    assert serve.main(["--port", "0", "--check"]) == 0


# --- transcripts ----------------------------------------------------------------------


@pytest.fixture
def snippet(tmp_path):
    path = tmp_path / "a.py"
    command = "# torchrun --nproc-per-node 2 a.py\n"
    path.write_text(command + 'import os\nprint("rank", os.environ["RANK"])\n')
    return path


def test_a_transcript_is_recorded_and_then_holds(snippet, capfd):
    assert transcripts.main(["--write", str(snippet)]) == 0
    assert snippet.with_suffix(".out").read_text() == "rank 0\nrank 1\n"
    assert transcripts.main([str(snippet)]) == 0


def test_a_stale_transcript_is_found_and_a_missing_one(snippet, capsys):
    assert transcripts.main([str(snippet)]) == 1
    snippet.with_suffix(".out").write_text("rank 0\nrank 2\n")
    assert transcripts.main([str(snippet)]) == 1
    out = capsys.readouterr().out
    assert "-rank 2" in out
    assert "+rank 1" in out
    assert "--write" in out


# --- what stops a build before it begins --------------------------------------------


@pytest.fixture
def shown(toy):
    """A snippet on a page, with a transcript that holds."""
    toy.write("src/toy/words.py", 'WORD = "one"\n')
    toy.write(
        "snippets/a.py",
        "# python snippets/a.py\nfrom toy.words import WORD\nprint(WORD)\n",
    )
    toy.write("snippets/a.out", "one\n")
    toy.write("docs/en/a.md", '```text\n--8<-- "snippets/a.out"\n```\n')
    return toy


@pytest.fixture
def runs(monkeypatch):
    """Which snippets were run, with what they print taken from their module."""
    ran = []

    def fresh(path):
        ran.append(path.name)
        words = (transcripts.config.SOURCE / "toy/words.py").read_text()
        return words.split('"')[1] + "\n"

    monkeypatch.setattr(transcripts, "fresh", fresh)
    return ran


def test_a_transcript_on_a_page_is_run_once(shown, runs):
    transcripts.require_embedded()
    transcripts.require_embedded()
    shown.write("src/toy/lone.py", "X = 1\n")
    transcripts.require_embedded()
    assert runs == ["a.py"]


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("snippets/a.out", "two\n", "snippets/a.py: stale transcript.*--write"),
        ("src/toy/words.py", 'WORD = "two"\n', "snippets/a.py: stale transcript"),
        ("docs/en/b.md", "```py\nx = 1\n```\n", "typed Python: x = 1"),
    ],
)
def test_stale_output_and_typed_code_stop_the_build(shown, runs, file, text, error):
    transcripts.require_embedded()
    shown.write(file, text)
    with pytest.raises(ValueError, match=error):
        prebuild.main()


def test_the_check_runs_real_snippets():
    """In a fresh interpreter, as from the command line."""
    name = "snippets/lc1/ring_all_reduce.py"
    done = subprocess.run(
        [sys.executable, "-m", "xtrain_docs.transcripts", name],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
