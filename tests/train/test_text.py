"""From text to tokens and back; the standard library's text; text by a model."""

import json
import multiprocessing
import sys
import sysconfig

import pytest
import torch

from tests.model.twins import config_of
from tests.train.layouts import name_of
from tests.train.test_layouts import DENSE, EXPERTS, wrapped
from xtrain.plan import Layout
from xtrain.train.sampling import generate
from xtrain.train.text import (
    ByteTokenizer,
    FileTokenizer,
    library_files,
    library_tokens,
    prepare,
)

PREPARE = "xtrain.train.text:prepare"
BYTES = "xtrain.train.text:ByteTokenizer"
OF_FILE = "xtrain.train.text:FileTokenizer"
FILES = "xtrain.train.text:library_files"
LIBRARY = "xtrain.train.text:library_tokens"
TEXTS = ["def f():\n    return 'ä'\n", "", "世界 and 42 dogs\n"]


@pytest.fixture
def paths(tmp_path):
    made = [tmp_path / f"{number}.txt" for number in range(len(TEXTS))]
    for path, text in zip(made, TEXTS, strict=True):
        path.write_text(text, encoding="utf-8", newline="")
    return made


@pytest.fixture
def root(tmp_path):
    """A little standard library."""
    root = tmp_path / "lib"
    names = [f"m{number:02}.py" for number in range(60)]
    names += ["json/a.py", "json/tests/b.py", "test/c.py", "site-packages/d.py"]
    for name in [*names, "idlelib/e.py", "notes.txt"]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (root / "gone.py").symlink_to(root / "missing.py")
    return root


def documents(file):
    ends = file.offsets.tolist()
    return [file.read(a, b).tolist() for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.verifies(PREPARE, BYTES)
def test_bytes_of_each_file_and_an_end(paths, tmp_path):
    file = prepare(paths, tmp_path / "out.tokens")
    assert file.vocab_size == 257
    assert documents(file) == [[*text.encode(), 256] for text in TEXTS]
    read = [ByteTokenizer().decode(ids) for ids in documents(file)]
    assert read == TEXTS
    assert ByteTokenizer().decode(file.read(0, 4)) == "def "
    assert ByteTokenizer().decode([0xE4, 97]) == "\ufffda"


@pytest.mark.verifies(OF_FILE)
def test_without_the_package_the_error_has_the_line_to_type(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizer.json .* pip install tokenizers"):
        FileTokenizer(tmp_path / "tokenizer.json")


def trained(path, **special):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, **special
    )
    made.train_from_iterator(["the dogs and the cats and 42 dogs"] * 9, trainer)
    made.save(str(path))
    return made


@pytest.mark.verifies(PREPARE, OF_FILE)
def test_a_tokenizer_of_hugging_face(paths, tmp_path):
    path = tmp_path / "tokenizer.json"
    made = trained(path, special_tokens=["<pad>", "<eos>", "<stop>"])
    template = pytest.importorskip("tokenizers").processors.TemplateProcessing
    made.post_processor = template(
        "<pad> $A <stop>", None, [("<pad>", 0), ("<stop>", 2)]
    )
    made.save(str(path))  # as many do: what it adds is no part of a document

    def ids_of(text):
        return made.encode(text, add_special_tokens=False).ids

    tokenizer = FileTokenizer(path)
    assert tokenizer.end == made.token_to_id("<eos>") == 1
    assert tokenizer.vocab_size == made.get_vocab_size()
    file = prepare(paths, tmp_path / "out.tokens", tokenizer)
    assert file.vocab_size == tokenizer.vocab_size
    assert documents(file) == [[*ids_of(text), 1] for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in documents(file)] == TEXTS
    assert tokenizer.decode(torch.tensor(ids_of("dogs"))) == "dogs"
    assert len(ids_of("the dogs")) < 8
    assert FileTokenizer(path, end="<stop>").end == 2


@pytest.mark.verifies(OF_FILE)
def test_the_vocabulary_reaches_to_the_largest_id(tmp_path):
    path = tmp_path / "tokenizer.json"
    trained(path, special_tokens=["<eos>"])
    described = json.loads(path.read_text())
    described["model"]["vocab"]["rare"] = 999  # ids in between have no token
    path.write_text(json.dumps(described))
    assert FileTokenizer(path).vocab_size == 1000


@pytest.mark.verifies(OF_FILE)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    trained(path)
    with pytest.raises(ValueError, match=r"tokenizer.json has none of <\|endoftext"):
        FileTokenizer(path)
    with pytest.raises(ValueError, match="tokenizer.json has no '<stop>'"):
        FileTokenizer(path, end="<stop>")
    for text in ("no json", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
            FileTokenizer(path)
    with pytest.raises(ValueError, match="missing is not a tokenizer"):
        FileTokenizer(tmp_path / "missing")


@pytest.mark.verifies(FILES)
def test_the_files_of_both_splits(root):
    train = library_files("train", root=root)
    evaluation = library_files("evaluation", root=root)
    assert train == sorted(train) and evaluation == sorted(evaluation)
    assert set(train) & set(evaluation) == set()
    wanted = [root / f"m{number:02}.py" for number in range(60)]
    assert set(train) | set(evaluation) == {*wanted, root / "json" / "a.py"}
    assert 1 <= len(evaluation) <= 8


@pytest.mark.verifies(FILES)
def test_a_limit_leaves_out_files_that_go_beyond_it(root):
    (root / "m01.py").write_text("x" * 200)
    everything = library_files(root=root)
    small = [path for path in everything if path.name != "m01.py"]
    limit = sum(path.stat().st_size for path in small[:5])
    assert limit < 200
    assert library_files(limit=limit, root=root) == small[:5]
    assert library_files(limit=limit + 1, root=root) == small[:5]
    assert library_files(limit=limit - 1, root=root) == small[:4]
    assert library_files(limit=1, root=root) == []


@pytest.mark.verifies(FILES)
@pytest.mark.parametrize("values", [{"split": "test"}, {"limit": 0}])
def test_a_split_or_limit_that_is_none_is_refused(root, values):
    with pytest.raises(ValueError, match="'test' of train, evaluation|limit=0"):
        library_files(root=root, **values)


@pytest.mark.verifies(LIBRARY, FILES)
def test_the_text_of_this_python(tmp_path):
    file = library_tokens(limit=300_000, cache=tmp_path)
    files = library_files(limit=300_000)
    assert 200_000 < len(file.tokens) - len(files) <= 300_000
    for ids, path in zip(documents(file), files, strict=True):
        assert bytes(ids[:-1]) == path.read_bytes() and ids[-1] == 256
    names = [
        path.relative_to(sysconfig.get_paths()["stdlib"]).parts
        for split in ("train", "evaluation")
        for path in library_files(split)
    ]
    assert ("abc.py",) in names and ("json", "decoder.py") in names
    assert not {"test", "tests", "idlelib", "site-packages"} & set().union(*names)


@pytest.mark.verifies(LIBRARY)
def test_a_corpus_is_made_once_and_again_if_damaged(root, tmp_path):
    cache = tmp_path / "cache"
    first = library_tokens(root=root, cache=cache)
    made = first.path.stat().st_ino
    assert library_tokens(root=root, cache=cache).path.stat().st_ino == made
    first.path.write_bytes(first.path.read_bytes()[:-1])
    assert library_tokens(root=root, cache=cache).checksum == first.checksum
    assert first.path.stat().st_ino != made


@pytest.mark.verifies(LIBRARY)
def test_what_makes_another_corpus_has_another_name(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    names = [
        library_tokens(root=root).path,
        library_tokens("evaluation", root=root).path,
        library_tokens(limit=60, root=root).path,
    ]
    (root / "m07.py").write_text("longer than before\n")
    names.append(library_tokens(root=root).path)
    assert len(set(names)) == 4
    assert {name.parent for name in names} == {tmp_path / "home" / "xtrain"}
    elsewhere = root.rename(tmp_path / "moved")
    assert library_tokens(root=elsewhere).path == names[-1]


def make(barrier, root, cache, results):
    barrier.wait(60)
    file = library_tokens(root=root, cache=cache)
    file.check()
    results.put(file.checksum)


@pytest.mark.verifies(LIBRARY, PREPARE)
def test_processes_that_prepare_the_same_corpus_at_once(root, tmp_path):
    """All see a whole file, and none leaves anything else."""
    cache, context = tmp_path / "cache", multiprocessing.get_context("fork")
    alone = library_tokens(root=root, cache=tmp_path / "alone")
    barrier, results = context.Barrier(3), context.Queue()
    given = barrier, root, cache, results
    processes = [context.Process(target=make, args=given) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert found == [alone.checksum] * 3
    assert [path.name for path in cache.iterdir()] == [alone.path.name]


def written(layout: Layout, changes, temperature: float) -> list[int]:
    model = wrapped(config_of(**changes), layout)
    options = {"sequence": 12, "temperature": temperature, "seed": 5}
    return generate(model, [3, 1, 4], 12, **options)


WRITING = (
    "xtrain.train.sampling:generate",
    "xtrain.train.sampling:drawn_by_stages",
)
PADDED = DENSE | {"padded_vocab_size": 26}


@pytest.mark.verifies(*WRITING)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(pipeline=2, context=2, micro_batches=2), PADDED),
        (
            Layout(pipeline=2, context=2, tensor=2, micro_batches=2, schedule="zb_v",
                   chunks=2),
            PADDED,
        ),
        (
            Layout(pipeline=2, context=2, micro_batches=4, schedule="dualpipe",
                   context_way="ulysses"),
            DENSE,
        ),
        (
            Layout(pipeline=2, context=2, data=2, expert=2, micro_batches=2),
            EXPERTS,
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, Layout) else "",
)  # fmt: skip
def test_pipeline_and_context_ranks_write_the_text_of_one_process(
    world, layout, changes, temperature
):
    expected = world(1).run(written, Layout(), changes, temperature)[0]
    found = world(layout.gpus).run(written, layout, changes, temperature)
    assert len(set(expected)) > 2 and found == [expected] * layout.gpus
