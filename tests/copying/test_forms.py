"""The file that a reader downloads is put together from text alone."""

import subprocess
import sys

import pytest

from xtrain.copying import whiteboard
from xtrain.copying.forms import FIELDS, forms, header


def test_a_download_is_the_form_then_the_harness_then_its_check():
    text = whiteboard("ring_all_reduce")
    assert text.startswith(forms()["ring_all_reduce"].read_text().rstrip())
    places = [
        text.index(s)
        for s in ("def ring_all", "def run(", "def check_ring", "__main__")
    ]
    assert places == sorted(places)
    assert "import xtrain" not in text
    assert "from xtrain" not in text
    lines = [
        line for line in text.splitlines() if line.startswith(("import ", "from "))
    ]
    assert len(lines) == len(set(lines))


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(
        ValueError, match=r"no whiteboard form 'ring_al.*ring_all_reduce"
    ):
        whiteboard("ring_allreduce")


def test_the_header_says_what_is_computed_sent_and_left_out():
    said = header(forms()["ring_all_reduce"].read_text())
    assert tuple(said) == FIELDS
    assert said["Sends"].startswith("2(N-1)/N of the tensor")


def test_handing_out_code_needs_no_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from xtrain.copying import whiteboard\n"
        "print(len(whiteboard('ring_all_reduce')) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
