"""Several jobs save to one folder, and others read: what is published is whole."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xtrain.checkpoint import (
    About,
    CheckpointError,
    CheckpointReader,
    CheckpointReplaced,
    Piece,
    latest,
    locks,
    save_pieces,
)
from xtrain.checkpoint import reader as reading
from xtrain.checkpoint.files import write_file
from xtrain.checkpoint.folder import (
    discard,
    move_to_place,
    pointer_to,
    prepare,
    publish,
    set_aside,
)
from xtrain.checkpoint.index import make_index
from xtrain.checkpoint.reader import open_newest

FILE = "rank-00000.safetensors"


def begin(directory, step, value=0.0):
    """A checkpoint that a job has written, and not yet published."""
    partial = prepare(Path(directory), step)
    pieces = [Piece("weight", (3,), (0,), torch.full((3,), value))]
    manifest = write_file(partial.path / FILE, pieces)
    return partial, make_index(step, {"value": value}, [manifest])


def save(directory, step, value=0.0):
    return publish(*begin(directory, step, value))


def value_in(path):
    """What a checkpoint was saved with; every piece of it is looked at."""
    with CheckpointReader(path) as reader:
        reader.verify([])
        return check_values(reader)


def check_values(reader):
    piece = Piece("weight", (3,), (0,), torch.empty(3))
    reader.check({"weight": About((3,), torch.float32)})
    reader.read([piece])
    value = reader.extra["value"]
    assert piece.data.tolist() == [value] * 3
    return value


def leftovers(directory):
    names = {path.name for path in Path(directory).glob(".*")}
    return names - {".lock"}


# -- two jobs


def save_often(directory, saves, groups):
    """Each group of ranks is a job; it saves steps of its own and steps that all save.

    After each save it reads what is the newest by now, whoever saved that.
    """
    made = [dist.new_group(ranks) for ranks in groups]
    job = next(n for n, ranks in enumerate(groups) if dist.get_rank() in ranks)
    group, index = made[job], groups[job].index(dist.get_rank())
    cut = [0, 1, 3] if len(groups[job]) == 2 else [0, 3]
    start, stop = cut[index : index + 2]
    paths = {}
    for number in range(saves):
        value = float(1000 * job + number)
        step = number % 5 if number % 2 else 1000 * (job + 1) + number
        piece = Piece("weight", (3,), (start,), torch.full((stop - start,), value))
        path = save_pieces(directory, step, [piece], {"value": value}, group)
        if step >= 1000:
            paths[str(path)] = value
        if index == 0:
            reader, name = open_newest(directory)
            with reader:
                assert reader.path.name == name
                reader.verify([])
                check_values(reader)
        if number % 5 == 0:
            dist.barrier()  # nobody is far ahead
    return paths


@pytest.mark.verifies(
    "xtrain.checkpoint.files:save_pieces",
    "xtrain.checkpoint.folder:prepare",
    "xtrain.checkpoint.folder:publish",
    "xtrain.checkpoint.locks:names_locked",
    "xtrain.checkpoint.folder:set_aside",
    "xtrain.checkpoint.folder:latest",
    "xtrain.checkpoint.reader:open_newest",
)
@pytest.mark.parametrize("saves", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_two_jobs_save_to_one_folder_and_all_that_is_published_loads(
    world, tmp_path, saves
):
    results = world(3).run(save_often, str(tmp_path), saves, [[0, 1], [2]], timeout=300)
    own = {path: value for paths in results for path, value in paths.items()}
    assert len(own) == 2 * len(range(0, saves, 2))
    for path, value in own.items():  # no other job has saved these steps
        assert value_in(path) == value
    published = list(tmp_path.glob("step-*"))
    assert {Path(path) for path in own} < set(published)
    for path in published:
        value_in(path)
    assert latest(tmp_path) in published
    assert leftovers(tmp_path) == set()
    shared = {path.name[:13] for path in published} - {Path(p).name for p in own}
    assert shared == {f"step-0000000{step}" for step in range(5)}


@pytest.mark.verifies("xtrain.checkpoint.folder:prepare")
def test_the_unfinished_save_of_a_living_job_is_left_alone(tmp_path):
    first, index = begin(tmp_path, 5, 1.0)
    assert value_in(save(tmp_path, 6, 2.0)) == 2.0
    again = begin(tmp_path, 5, 3.0)  # even of the same step
    assert value_in(publish(first, index)) == 1.0
    assert value_in(publish(*again)) == 3.0
    dead, _ = begin(tmp_path, 7)
    dead.release()  # as its process' end does
    assert leftovers(tmp_path) == {dead.path.name}
    save(tmp_path, 8)
    assert leftovers(tmp_path) == set()
    failed, _ = begin(tmp_path, 9)
    discard(failed)
    assert leftovers(tmp_path) == set()


def test_a_step_saved_again_replaces_what_was_there_when_it_began(tmp_path):
    first = save(tmp_path, 5, 1.0)
    second, third = begin(tmp_path, 5, 2.0), begin(tmp_path, 5, 3.0)
    second = publish(*second)
    assert second != first and not first.exists()
    fourth = save(tmp_path, 5, 4.0)
    assert fourth == first  # the name is free again
    third = publish(*third)
    assert value_in(fourth) == 4.0, "it was published after the third had begun"
    assert value_in(third) == 3.0 and latest(tmp_path) == third
    assert value_in(save(tmp_path, 5, 5.0)) == 5.0
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_steps_with_a_common_beginning_are_different_steps(tmp_path):
    steps, saved = [10**7, 10**8, 10**8 + 7, 10**9, 0], set()
    for step in [*steps, *reversed(steps)]:
        save(tmp_path, step, float(step % 97))
        saved.add(step)
        paths = list(tmp_path.glob("step-*"))
        assert len(paths) == len(saved)
        for path in paths:
            found = int(path.name.split("-")[1])
            assert found in saved
            assert value_in(path) == found % 97


def test_what_a_save_that_was_killed_left_is_removed(tmp_path):
    save(tmp_path, 1)
    for name in (".partial-step-00000003-aaaaaaaa", ".deleted-bbbbbbbb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text("half")
    (tmp_path / ".latest-cccccccc").write_text("step-00")
    path = save(tmp_path, 2)
    assert leftovers(tmp_path) == set()
    assert {file.name for file in path.iterdir()} == {FILE, "index.json"}


# -- somebody reads


@pytest.mark.verifies("xtrain.checkpoint.locks:hold")
def test_a_checkpoint_that_is_being_read_is_not_replaced(tmp_path):
    first = save(tmp_path, 5, 1.0)
    reader = CheckpointReader(first)
    second = save(tmp_path, 5, 2.0)
    assert latest(tmp_path) == second
    assert check_values(reader) == 1.0
    reader.close()
    save(tmp_path, 5, 3.0)
    assert not second.exists() and value_in(latest(tmp_path)) == 3.0
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_a_reader_that_is_forgotten_holds_nothing(tmp_path):
    first = save(tmp_path, 5)
    CheckpointReader(first)
    (first / FILE).write_text("damaged")
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(first)
    save(tmp_path, 5)
    assert not first.exists(), caught  # the error still knows the reader


@pytest.mark.verifies("xtrain.checkpoint.reader:CheckpointReader")
def test_a_checkpoint_that_is_gone_says_so(tmp_path, monkeypatch):
    path = save(tmp_path, 5)
    with CheckpointReader(path) as reader:
        shutil.rmtree(path)
        with pytest.raises(CheckpointReplaced, match="load again"):
            reader.verify([])

    path = save(tmp_path, 5)
    held = os.open(path / "index.json", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)  # just being taken away
    with pytest.raises(CheckpointReplaced, match="load again"):
        CheckpointReader(path)
    os.close(held)
    assert value_in(path) == 0.0

    original = locks.take_lock

    def too_late(descriptor, how):
        set_aside(path, "index.json") if how == fcntl.LOCK_SH else None
        return original(descriptor, how)

    monkeypatch.setattr(locks, "take_lock", too_late)
    with pytest.raises(CheckpointReplaced, match="load again"):
        locks.hold(path / "index.json")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="no index.json"):
        CheckpointReader(path)


@pytest.mark.verifies("xtrain.checkpoint.reader:open_newest")
def test_who_reads_latest_just_before_it_moves_reads_the_new_one(tmp_path, monkeypatch):
    save(tmp_path, 5, 1.0)
    original = reading.hold
    replace_once = iter([lambda: save(tmp_path, 5, 2.0)])

    def hold(index):
        next(replace_once, lambda: None)()
        return original(index)

    monkeypatch.setattr(reading, "hold", hold)
    reader, name = open_newest(tmp_path)
    with reader:
        assert check_values(reader) == 2.0
        assert name == latest(tmp_path).name
    shutil.rmtree(latest(tmp_path))
    with pytest.raises(CheckpointError, match="no index.json"):
        open_newest(tmp_path)


# -- locks


def no_locks(descriptor, how):
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_nothing_of_others_is_deleted(tmp_path, monkeypatch):
    first = save(tmp_path, 5, 1.0)
    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    other, index = begin(tmp_path, 6, 3.0)
    (tmp_path / ".latest-cccccccc").write_text("step-00")
    second = save(tmp_path, 5, 2.0)
    assert latest(tmp_path) == second
    assert value_in(first) == 1.0 and value_in(second) == 2.0
    assert leftovers(tmp_path) == {other.path.name, ".latest-cccccccc"}
    assert value_in(publish(other, index)) == 3.0


def test_a_folder_whose_lock_may_not_be_opened_has_no_locks(tmp_path):
    (tmp_path / ".lock").mkdir()
    first, second = save(tmp_path, 5, 1.0), save(tmp_path, 5, 2.0)
    assert value_in(first) == 1.0 and value_in(second) == 2.0


def test_a_lock_that_is_never_given_back_is_an_error_that_names_it(
    tmp_path, monkeypatch
):
    path = save(tmp_path, 5)
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    held = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=r"another job holds .*/\.lock"):
        save(tmp_path, 6)
    os.close(held)
    monkeypatch.undo()
    save(tmp_path, 6)
    assert value_in(path) == 0.0


def test_the_lock_is_free_after_a_save_even_if_a_child_was_forked(tmp_path):
    """A forked child has the parent's open files, and with them their locks."""
    with locks.names_locked(tmp_path) as alone:
        assert alone
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent has closed its end
            os._exit(0)
        os.close(reading)
    try:
        held = os.open(tmp_path / ".lock", os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_name_that_is_taken_at_the_last_moment(tmp_path, monkeypatch):
    first = save(tmp_path, 5, 1.0)
    partial, index = begin(tmp_path, 5, 2.0)
    (partial.path / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(Path, "exists", lambda path: False)
    moved = move_to_place(partial.path, partial.final)
    monkeypatch.undo()
    assert moved != first and moved.name.startswith("step-00000005-")
    assert value_in(first) == 1.0 and value_in(moved) == 2.0


@pytest.mark.verifies("xtrain.checkpoint.folder:check_files")
def test_a_save_whose_folder_was_taken_away_is_not_published(tmp_path):
    save(tmp_path, 4)
    for spoil in (
        lambda path: shutil.rmtree(path),
        lambda path: (path / FILE).unlink(),
        lambda path: (path / FILE).write_text("short"),
    ):
        partial, index = begin(tmp_path, 5)
        spoil(partial.path)
        with pytest.raises(CheckpointError, match="bytes were written"):
            publish(partial, index)
        discard(partial)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000004"]
    assert latest(tmp_path).name == "step-00000004"


# -- latest


@pytest.mark.verifies("xtrain.checkpoint.folder:latest")
def test_no_bit_of_latest_can_be_wrong(tmp_path):
    names = ["step-00000012", "step-00000013", "step-100000000-0123abcd"]
    for name in names:
        good = pointer_to(name).encode()
        (tmp_path / "latest").write_bytes(good)
        assert latest(tmp_path) == tmp_path / name
        bad = [good[:length] for length in range(len(good))]
        bad += [good + b"\n", good + b" ", good.replace(b" ", b" ../"), good.upper()]
        for place in range(len(good)):
            for bit in range(8):
                data = bytearray(good)
                data[place] ^= 1 << bit
                bad.append(bytes(data))
        for text in bad:
            (tmp_path / "latest").write_bytes(text)
            with pytest.raises(CheckpointError, match="latest is damaged"):
                latest(tmp_path)


def test_a_latest_of_before_there_were_checksums_is_still_read(tmp_path):
    for name in ("step-00000012", "step-100000000", "step-00000012-0123abcd"):
        (tmp_path / "latest").write_text(name)
        (tmp_path / name).mkdir()
        for text in (None, "", "[1]", '{"format": 2}', '{"format": 1}'):
            if text is not None:
                (tmp_path / name / "index.json").write_text(text)
            if text == '{"format": 1}':
                assert latest(tmp_path) == tmp_path / name
            else:  # the rest of one with a checksum, not of that time
                with pytest.raises(CheckpointError, match="latest is damaged"):
                    latest(tmp_path)
    for text in (
        "",
        "step-1",
        "../step-00000012",
        "/step-00000012",
        "step-00000012/..",
    ):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="latest is damaged"):
            latest(tmp_path)


def test_a_latest_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest cannot be read"):
        latest(tmp_path)
    (tmp_path / "latest").rmdir()
    os.mkfifo(tmp_path / "latest")  # would be waited at
    with pytest.raises(CheckpointError, match="latest cannot be read"):
        latest(tmp_path)
