"""An index is read as it was written or refused, whatever somebody made of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.checkpoint.crafted import change_index, drop, pieces, update
from tests.checkpoint.test_checkpoint import load_small, save_small
from tests.checkpoint.test_company import save
from xtrain.checkpoint import About, CheckpointError, CheckpointReader, Piece, latest
from xtrain.checkpoint.files import write_file
from xtrain.checkpoint.folder import prepare, publish
from xtrain.checkpoint.index import crc, make_index
from xtrain.checkpoint.optimizer_state import check_groups, saved_state
from xtrain.checkpoint.random_state import read_random_states

FILES = "rank-00000.safetensors", "rank-00001.safetensors"


def pieces_of(rank):
    """Two ranks' pieces: columns of weights, state cut alike; a number on one."""
    values = torch.arange(6.0).view(2, 3)[:, (0, 2)[rank] : (2, 3)[rank]]
    pieces = [
        Piece("w", (2, 3), (0, 2 * rank), values),
        Piece(":cut:exp_avg:w", (2, 3), (0, 2 * rank), values + 10),
        Piece(f":random:cpu:{rank}", (4,), (0,), torch.arange(4).to(torch.uint8)),
    ]
    if rank == 0:
        pieces.append(Piece(":number:step:w", (), (), torch.tensor(7.0)))
        pieces.append(Piece("b", (2,), (0,), torch.tensor([1.0, 2.0]).double()))
    return pieces


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    partial = prepare(tmp_path_factory.mktemp("run"), 3)
    manifests = [write_file(partial.path / FILES[r], pieces_of(r)) for r in (0, 1)]
    extra = {"user": {"epoch": 2}, "ranks": 2, "groups": [{"lr": 0.5}]}
    return publish(partial, make_index(3, extra, manifests))


def everything_in(path):
    """All that a load takes from a checkpoint's tensors."""
    with CheckpointReader(path) as reader:
        wanted = [
            Piece("w", (2, 3), (0, 0), torch.zeros(2, 3)),
            Piece("b", (2,), (0,), torch.zeros(2).double()),
        ]
        kinds = {p.name: About(p.shape, p.data.dtype) for p in wanted}
        reader.check(kinds, ignore=":")
        check_groups(None, reader)
        saved = saved_state(reader)
        wanted += [
            Piece(":cut:exp_avg:w", (2, 3), (0, 0), torch.zeros(2, 3)),
            Piece(":number:step:w", (), (), torch.zeros(())),
            Piece(":random:cpu:1", (4,), (0,), torch.zeros(4, dtype=torch.uint8)),
        ]
        reader.verify(wanted)
        reader.read(wanted)
        return [p.data.flatten().tolist() for p in wanted], saved, set(reader.tensors)


WRITTEN = (
    [list(range(6)), [1, 2], list(range(10, 16)), [7], list(range(4))],
    {"w": {"exp_avg": (True, None), "step": (False, torch.float32)}},
    {"w", "b", ":cut:exp_avg:w", ":number:step:w", ":random:cpu:0", ":random:cpu:1"},
)


def outcome(path):
    try:
        return everything_in(path)
    except CheckpointError:  # and nothing else
        return None


fuzz = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzz
@given(place=st.floats(0, 1), length=st.integers(0, 6), new=st.binary(max_size=6))
def test_changed_bytes_are_the_same_index_or_an_error(good, place, length, new):
    """The checksum stays: what still matches it means the same."""
    path = good / "index.json"
    text = path.read_bytes()
    where = int(place * len(text))
    try:
        path.write_bytes(text[:where] + new + text[where + length :])
        changed = outcome(good)
        if changed is not None:
            with CheckpointReader(good) as reader:
                assert reader.index == json.loads(text)
    finally:
        path.write_bytes(text)
    assert changed in (None, WRITTEN)


numbers = st.integers(-3, 9) | st.sampled_from([2**31, 2**63, 10**30, 1e308])
words = st.sampled_from(
    [*FILES, "rank-00007.safetensors", "../" + FILES[0], "/etc/passwd", "", ".", "..",
     "index.json", "w", "b", ":cut:exp_avg:w", ":cut:exp_avg:b", ":cut:x", ":number::w",
     ":random:cpu:0", ":odd:1:2", "float32", "float64", "uint8", "nn", "Tensor",
     "float", "\ud800", "\0"]
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | words | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3)
    ),
    max_leaves=6,
)


def nodes(tree, above=()):
    """Every container of a tree with every key or place in it."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(pairs):
        yield tree, key
        if isinstance(value, dict | list):
            yield from nodes(value)


def mutate(index, draw):
    """Change, remove, repeat, rename or swap one thing somewhere in an index."""
    found = list(nodes(index))
    container, key = found[draw(st.integers(0, len(found) - 1))]
    other, other_key = found[draw(st.integers(0, len(found) - 1))]
    how = draw(st.sampled_from(["value", "remove", "copy", "swap", "rename", "add"]))
    if how == "value":
        container[key] = draw(values)
    elif how == "remove":
        del container[key]
    elif how == "copy":
        container[key] = json.loads(json.dumps(other[other_key]))
    elif how == "swap":
        try:
            a, b = json.dumps(container[key]), json.dumps(other[other_key])
            container[key], other[other_key] = json.loads(b), json.loads(a)
        except (KeyError, IndexError):
            pass  # one was inside the other
    elif isinstance(container, dict):
        container[draw(words)] = draw(values) if how == "add" else container.pop(key)
    else:
        container.append(draw(values) if how == "add" else container.pop(key))


@fuzz
@given(data=st.data())
@pytest.mark.verifies("xtrain.checkpoint.structure:check_structure")
def test_a_crafted_index_gives_the_same_tensors_or_an_error(good, data):
    """Its checksum is right: whoever writes an index can write that, too."""
    path = good / "index.json"
    text = path.read_text()

    def mutate_once_or_twice(index):
        for _ in range(data.draw(st.integers(1, 2))):
            mutate(index, data.draw)

    try:
        change_index(good, mutate_once_or_twice)
        changed = outcome(good)
    finally:
        path.write_text(text)
    assert changed in (None, WRITTEN)


def tensor(name, **values):
    return update("tensors", name, **values)


def piece(place, value, number=1):
    return pieces("w", lambda found: found[number].__setitem__(place, value))


def add(name, shape=(2, 3)):
    """A tensor with the pieces of `w`."""
    return lambda index: index["tensors"].update(
        {name: {**index["tensors"]["w"], "shape": list(shape)}}
    )


THREE_DIMS = [[0] * 3, [1] * 3, FILES[0], 0]
ABOVE, ABSOLUTE = {"../" + FILES[0]: 3}, {"/" + FILES[0]: 3}
NO_STATE = [[[0], [2], FILES[0], 0]]
CRAFTED = {
    "a tensor without pieces": (tensor("w", pieces=[]), r"w: element \[0, 0\] is in"),
    "no first piece": (drop("tensors", "w", "pieces", 0), r"w: element \[0, 0\]"),
    "no last piece": (drop("tensors", "w", "pieces", 1), r"w: element \[0, 2\]"),
    "beyond the end": (piece(1, [3, 1]), r"size \[3, 1\] at \[0, 2\] of \[2, 3\]"),
    "a piece that begins at the end": (piece(0, [0, 3]), r"at \[0, 3\] of \[2, 3\]"),
    "a piece without elements": (piece(1, [2, 0]), r"size \[2, 0\] at \[0, 2\] of"),
    "a larger piece": (piece(1, [2, 3], 0), r"two pieces have element \[0, 2\]"),
    "an offset below 0": (piece(0, [0, -1]), r"at \[0, -1\]: no numbers"),
    "an offset of floats": (piece(0, [0, 2.0]), r"at \[0, 2.0\]: no numbers"),
    "an offset of bools": (piece(0, [False, 2]), r"at \[False, 2\]: no numbers"),
    "an offset without dims": (piece(0, 4), "at 4: no numbers"),
    "a size without dims": (piece(1, 2), "size 2 at .*: no numbers"),
    "too few dims in an offset": (piece(0, [2]), r"at \[2\] of 2 dims"),
    "too many dims in an offset": (piece(0, [0, 2, 0]), r"at \[0, 2, 0\] of 2 dims"),
    "too few dims in a size": (piece(1, [2]), r"size \[2\] at .* of 2 dims"),
    "too many dims in both": (
        pieces("w", lambda found: found.append(THREE_DIMS)),
        r"at \[0, 0, 0\] of 2 dims",
    ),
    "two pieces that overlap": (piece(0, [0, 1]), r"two pieces have element \[0, 1\]"),
    "a piece twice": (
        pieces("w", lambda found: found.append(found[1])),
        r"two pieces have element \[0, 2\]",
    ),
    "a number twice": (
        pieces(":number:step:w", lambda found: found.append(found[0])),
        r"two pieces have element \[\]",
    ),
    "a gap in a corner": (piece(1, [1, 1]), r"w: element \[1, 2\] is in no piece"),
    "a larger shape": (tensor("w", shape=[3, 3]), r"w: element \[2, 0\] is in no"),
    "a shape of other dims": (tensor("w", shape=[6]), "of 1 dims"),
    "format 1, not 2": (update(format=1), r"elements \[0, 0\] to \[2, 2\] of 6"),
    "a format that is true": (update(format=True), "format True"),
    "a format to come": (update(format=3), "has format 3, this re"),
    "another shape of as many": (tensor("w", shape=[3, 2]), r"of \[3, 2\]"),
    "another shape, and pieces": (
        tensor("b", shape=[2, 1], pieces=[[[0, 0], [2, 1], FILES[0], 0]]),
        "of another model",
    ),
    "a shape without dims": (tensor("w", shape="23"), "w has no shape"),
    "a shape below 0": (tensor("w", shape=[-2, -3]), "w has no shape"),
    "another dtype": (tensor("w", dtype="float64"), "dtype float32"),
    "a dtype of another kind": (tensor("w", dtype="nn"), "w has no dtype"),
    "a dtype of ints": (tensor("w", dtype="int32"), "torch.int32 in the checkpoint"),
    "no dtype": (drop("tensors", "w", "dtype"), "w has no dtype"),
    "no list of pieces": (tensor("w", pieces={}), "w has no list of pieces"),
    "five in a piece": (pieces("w", lambda found: found[0].append(1)), "w: no piece"),
    "a file that is not listed": (piece(2, "rank-00002.safetensors"), "no file 'rank"),
    "a file above": (piece(2, "../" + FILES[1]), "no file '../rank"),
    "a file that is a list": (piece(2, []), r"no file \[\]"),
    "another file": (piece(2, FILES[0]), "it has other tensors"),
    "a checksum of 33 bits": (piece(3, 2**32), "a piece has no checksum"),
    "another checksum": (piece(3, 5), "wrong checksum"),
    "a listed file above": (update("files", **ABOVE), "is not the name of a file"),
    "a listed path": (update("files", **ABSOLUTE), "is not the name of a file"),
    "a file's size": (update("files", **{FILES[0]: 3}), "3 bytes, [0-9]+ found"),
    "a file's size in words": (
        update("files", **{FILES[0]: "3"}),
        "the size of rank-00000.safetensors is not a number",
    ),
    "half a character": (add("\ud800"), "surrogates"),
    "state of nothing": (add(":cut:exp_avg:other"), "exp_avg:other fits no tensor"),
    "state of another shape": (
        tensor(":cut:exp_avg:w", shape=[2], pieces=NO_STATE),
        ":cut:exp_avg:w fits no tensor",
    ),
    "a number that is a vector": (add(":number:x:w"), ":number:x:w fits no tensor"),
    "an unknown kind": (add(":odd:exp_avg:w"), "what is ':odd:exp_avg:w'"),
    "a label cut short": (add(":cut:exp_avg"), "what is ':cut:exp_avg'"),
    "a tensor left out": (drop("tensors", ":random:cpu:0"), "it has other tensors"),
    "no ranks": (drop("extra", "ranks"), "not a checkpoint of a sharded model"),
    "ranks that are true": (update("extra", ranks=True), "ranks"),
    "groups that are a number": (update("extra", groups=3), "groups"),
    "a step that is true": (update(step=True), "its step"),
    "a step below 0": (update(step=-1), "its step"),
    "no format": (drop("format"), "has format None"),
    "no step": (drop("step"), "its step"),
    "no world_size": (drop("world_size"), "its world size"),
    "no extra": (drop("extra"), "it has no extra"),
    "no files": (drop("files"), "it has no files"),
    "no tensors": (drop("tensors"), "it has no tensors"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_an_index_that_could_be_misread_is_refused(good, what):
    change, match = CRAFTED[what]
    path = good / "index.json"
    text = path.read_text()
    for elsewhere in (good.parent / FILES[0], good.parent / FILES[1]):
        shutil.copy(good / FILES[1], elsewhere)  # a path that leads out would find it
    try:
        change_index(good, change)
        with pytest.raises(CheckpointError, match=match):
            everything_in(good)
    finally:
        path.write_text(text)
    assert everything_in(good) == WRITTEN


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 100_000, "index.json is damaged"),
        (b'{"format":1,"x":' + b"[" * 900 + b"]" * 900 + b"}", "index.json is damaged"),
        (b"9" * 5000, "index.json is damaged"),
        (b"\xff\xfe", "index.json is damaged"),
        (b"", "index.json is damaged"),
        (b"[1]", "has format None"),
        (b'{"format": 1}', "does not match its checksum"),
    ],
    ids=range(7),
)
def test_a_text_that_is_no_index(good, text, match):
    path = good / "index.json"
    right = path.read_bytes()
    try:
        path.write_bytes(text)
        with pytest.raises(CheckpointError, match=match):
            CheckpointReader(good)
    finally:
        path.write_bytes(right)


def test_an_index_that_is_no_file(tmp_path):
    (tmp_path / "index.json").mkdir()
    with pytest.raises(CheckpointError, match="index.json cannot be read"):
        CheckpointReader(tmp_path)


SPARE, NOTHING = {"weight@7": torch.zeros(1)}, torch.zeros(0)


@pytest.mark.parametrize(
    ("tensors", "checksum", "match"),
    [
        (SPARE, None, "it has other tensors"),
        ({"weight@0": NOTHING}, crc(NOTHING), r"shape \[0\] in the file"),
    ],
)
def test_a_file_must_have_what_the_index_says_and_nothing_else(
    tmp_path, tensors, checksum, match
):
    """Another tensor, or another length, though all checksums are right."""
    path = save(tmp_path, 1)
    file = path / FILES[0]
    save_file(load_file(file) | tensors, file)

    def change(index):
        index["files"][FILES[0]] = file.stat().st_size
        if checksum is not None:
            index["tensors"]["weight"]["pieces"][0][3] = checksum

    change_index(path, change)
    with pytest.raises(CheckpointError, match=match), CheckpointReader(path) as reader:
        reader.verify([])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named_with_both(tmp_path, change):
    path = save(tmp_path, 1)
    file = path / FILES[0]
    data = file.read_bytes()
    file.write_bytes(data[:-1] if change < 0 else data + b"x")
    match = f"{FILES[0]} is damaged: {len(data)} bytes, {len(data) + change} found"
    with pytest.raises(CheckpointError, match=match):
        CheckpointReader(path)


def test_boxes_that_only_touch_are_not_read(good):
    columns = {(0, 2): [0], (2, 3): [1], (1, 3): [0, 1], (0, 3): [0, 1], (1, 2): [0]}
    with CheckpointReader(good) as reader:
        for (start, stop), files in columns.items():
            for row, rows in ((0, 2), (0, 1), (1, 1)):
                data = torch.zeros(rows, stop - start)
                wanted = Piece("w", (2, 3), (row, start), data)
                found = [stored.file for stored in reader.overlapping(wanted)]
                assert found == [FILES[number] for number in files]
                reader.read([wanted])
                expected = torch.arange(6.0).view(2, 3)[row : row + rows, start:stop]
                assert torch.equal(data, expected)


def test_a_random_state_that_is_none_is_refused(good):
    with CheckpointReader(good) as reader:
        assert read_random_states(reader, 2) == {}
        with pytest.raises(CheckpointError, match=r":random:cpu:0 is \[4\] of"):
            read_random_states(reader, 0)


# -- on ranks


def reshape_random(index):
    entry = index["tensors"][":random:cpu:0"]
    entry["shape"] = entry["pieces"][0][1] = [8, 632]
    entry["pieces"][0][0] = [0, 0]


CRAFTED_ON_RANKS = {
    "no list of pieces": (tensor("0.weight", pieces=None), "0.weight has no list"),
    "no groups": (drop("extra", "groups"), "not a checkpoint of a sharded model"),
    "groups of nothing": (update("extra", groups=[3]), "its groups' options"),
    "groups that bring parameters": (
        lambda index: index["extra"]["groups"][0].update(params=[]),
        "its groups' options",
    ),
    "a random state of other dims": (reshape_random, "it has other tensors"),
}


def load_each_crafted(directory):
    """Rank 0 writes an index, both load it; None where it was loaded, or the error."""
    path = latest(directory) / "index.json"
    text, said = path.read_text(), []
    dist.barrier()
    for change, _ in CRAFTED_ON_RANKS.values():
        if dist.get_rank() == 0:
            path.write_text(text)
            change_index(path.parent, change)
        dist.barrier()
        try:
            load_small(directory)
            said.append(None)
        except CheckpointError as error:
            said.append(str(error))
        dist.barrier()
    return said


def test_every_rank_refuses_a_crafted_index(world, tmp_path):
    world(2).run(save_small, str(tmp_path), 1)
    index = json.loads((latest(tmp_path) / "index.json").read_text())
    assert index["tensors"][":random:cpu:0"]["shape"] == [8 * 632]
    first, second = world(2).run(load_each_crafted, str(tmp_path))
    assert first == second
    for said, (_, match) in zip(first, CRAFTED_ON_RANKS.values(), strict=True):
        assert said and match in said, (said, match)
        assert str(Path(tmp_path)) in said
