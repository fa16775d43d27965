"""The page about the house: its floors are those of the imports."""

import re

import pytest

from tests.test_floors import FLOOR
from xtrain_docs import config
from xtrain_docs.figures import house


def test_every_room_stands_above_all_that_it_imports_from() -> None:
    place = {name: n for n, names in enumerate(house.floors()) for name in names}
    assert place.keys() == house.rooms().keys() == FLOOR.keys() - {"__main__"}
    for name, room in house.rooms().items():
        below = [place[other] for other in room.uses]
        assert place[name] == (1 + max(below) if below else 0), name
        assert all(FLOOR[other] < FLOOR[name] for other in room.uses), name


def test_imports_of_a_room_are_found_wherever_they_stand(tmp_path) -> None:
    package = tmp_path / "xtrain"
    for name, text in {
        "low/__init__.py": '"""Below."""\n',
        "mid/__init__.py": '"""Between.\n\nMore."""\n',
        "mid/deep/part.py": "def f():\n    from ...low import x\n",
        "top.py": "import xtrain.mid.deep.part\n",
        "__init__.py": "",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = house.rooms(package)
    assert {name: sorted(room.uses) for name, room in found.items()} == {
        "low": [], "mid": ["low"], "top": ["mid"],
    }  # fmt: skip
    assert (found["mid"].says, found["mid"].files, found["mid"].lines) == (
        "Between", 2, 5,
    )  # fmt: skip


def test_the_page_names_files_and_modules_that_exist() -> None:
    text = (config.PAGES / "house.md").read_text()
    named = re.findall(r"`(docs/[\w./-]+|xtrain_docs\.\w+)`", text)
    assert len(named) >= 5
    for name in named:
        path = name if "/" in name else f"src/{name.replace('.', '/')}.py"
        assert (config.ROOT / path).exists(), name


@pytest.mark.parametrize("name", ["ring_all_reduce", "post_all", "wait_all"])
def test_the_functions_that_the_text_names_are_on_the_way(name: str) -> None:
    printed = (config.ROOT / "snippets/lc1/life_of_a_tensor.out").read_text()
    assert re.search(rf"\b{name}\b", printed)
