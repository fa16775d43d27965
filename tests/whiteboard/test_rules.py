"""What every whiteboard form keeps to, so that it can be written in an interview.

One public name per file, named as the file; 60 lines of code; torch and the standard
library; a header that says what it computes, sends and leaves out; the library form's
arguments. Forms of `comm` are made of send and receive.
"""

import ast
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from xtrain import comm, schedules, zero
from xtrain.copying.forms import FIELDS, MOST_LINES, forms, header, lines_of_code

FORMS = forms()
MAX_COLUMNS = 88

TWINS: dict[str, Callable] = {
    "comm": lambda name: getattr(comm, name),
    "data_parallel": lambda name: twin_in("xtrain.data_parallel", name),
    "zero": lambda name: twin_in("xtrain.zero", LONGER.get(name, name)),
    "tensor_parallel": lambda name: cut_from_full(LONGER.get(name, name)),
    "schedules": lambda name: getattr(schedules, name),
    "pipeline_parallel": lambda name: twin_in("xtrain.pipeline_parallel", name),
    "context_parallel": lambda name: twin_in(
        "xtrain.context_parallel", LONGER.get(name, name)
    ),
    "expert_parallel": lambda name: from_full_if_any(
        twin_in("xtrain.expert_parallel", name)
    ),
}
LONGER = {
    "clip_grad_norm": "clip_sharded_grad_norm",
    "fully_sharded": "fully_sharded_data_parallel",
    "fully_sharded_prefetch": "fully_sharded_data_parallel",
    "mixed_precision": "mixed_precision_optimizer",
    "ring_attention_forward": "ring_attention",
    "tensor_parallel_attention": "parallel_attention",
    "tensor_parallel_mlp": "parallel_swiglu",
    "zero_1": "zero_optimizer",
    "zero_2": "zero_optimizer",
}
"""Forms that the library has under another name, or several under one."""
NO_TWIN: dict[str, str] = {
    "decode_attention": "there ring_online_softmax merges what ranks find for a query",
    "dispatch": "there plan_dispatch exchanges the counts, and dispatch has a plan",
    "expert_capacity": "there that is the number alone; within_capacity has the mask",
    "mesh_training_step": "there accumulate trains a wrapped model of any layout",
    "gpipe_step": "there PipelineRunner runs the list of any schedule",
    "ring_attention_backward": "there autograd calls it, as ring_attention's backward",
    "one_f_one_b_step": "there PipelineRunner runs the list of any schedule",
    "overlapped_all_to_all": "there the chunks are those of a model's layers",
    "rotary_embedding": "the library makes a table of angles, then turns by it",
    "sequence_parallel_region": "there every layer takes sequence_parallel=True",
}
"""Forms that the library has under no name of theirs, each with the reason."""

DISTRIBUTED = re.compile(r"(dist|torch\.distributed)(\.\w+)*")
MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp"}
ASKING = {"get_rank", "get_world_size", "ProcessGroup", "Work"}
TRANSLATING = {"get_global_rank", "get_group_rank", "get_process_group_ranks"}
COLLECTIVES = {"one_shot_all_reduce": {"all_to_all_single"}}
"""What a form of comm may use besides messages: one call that hands over all."""


def twin_in(package: str, name: str) -> Callable:
    """A form `distributed_data_parallel` is the library's DistributedDataParallel."""
    module = importlib.import_module(package)
    wanted = folded(name)
    return next(getattr(module, n) for n in dir(module) if folded(n) == wanted)


def cut_from_full(name: str) -> Callable:
    """A layer's form is made of the whole layer, as by the library's `from_full`."""
    return from_full_if_any(twin_in("xtrain.tensor_parallel", name))


def from_full_if_any(twin: Callable) -> Callable:
    """What makes a part of a whole module; the twin itself if it is no such part."""
    return getattr(twin, "from_full", twin)


def folded(name: str) -> str:
    return name.replace("_", "").lower()


def broken_rules(name: str, text: str, of_comm: bool) -> list[str]:
    """What is wrong with a form's text."""
    tree, lines = ast.parse(text), text.splitlines()
    count = lines_of_code(text)
    broken = [f"{count} lines of code"] * (count > MOST_LINES)
    broken += [
        f"line {i} is {len(s)} wide" for i, s in numbered(lines) if len(s) > MAX_COLUMNS
    ]
    broken += [f"line {line} has a ;" for line in semicolons(text)]
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    public = [n for n in tree.body if isinstance(n, kinds) and n.name[0] != "_"]
    if [folded(node.name) for node in public] != [folded(name)]:
        broken.append(f"public names: {[node.name for node in public]}")
    broken += [f"{n.name} has no docstring" for n in public if not ast.get_docstring(n)]
    said = header(text)
    broken += [f"the header has no line {f}:" for f in FIELDS if not said.get(f)]
    broken += [f"imports {m}" for m in imported(tree) if not allowed(m)]
    if "P2POp" in distributed_names(tree) and (alone := sent_alone(tree)):
        # NCCL sends a batch over another communicator than a message of its own.
        broken.append(f"messages in batches, and dist.{alone[0]} beside them")
    if of_comm:
        extra = COLLECTIVES.get(name, set())
        used = distributed_names(tree) - MESSAGES - ASKING - TRANSLATING - extra
        broken += [f"uses dist.{n}" for n in sorted(used)]
    return broken


def numbered(lines: list[str]) -> list[tuple[int, str]]:
    return list(enumerate(lines, start=1))


def semicolons(text: str) -> list[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [t.start[0] for t in tokens if t.type == tokenize.OP and t.string == ";"]


def imported(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
    return found


def allowed(module: str) -> bool:
    top = module.split(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def distributed_names(tree: ast.AST) -> set[str]:
    """Every `dist.x`, `torch.distributed.x` and name imported from there."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if DISTRIBUTED.fullmatch(ast.unparse(node.value)):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            found |= {alias.name for alias in node.names}
    return found


def sent_alone(tree: ast.AST) -> list[str]:
    """The calls that send or receive one message, not in a batch."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    alone = MESSAGES - {"batch_isend_irecv", "P2POp"}
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr in alone]


def differing_arguments(form: Callable, twin: Callable) -> list[str]:
    """How a form's arguments differ from the library form's.

    It may leave some out; those before the first one left out stand at the same place
    under the same name. The groups come last, as there.
    """
    mine = list(inspect.signature(form).parameters)
    theirs = list(inspect.signature(twin).parameters)
    plain = [name for name in mine if not name.endswith("group")]
    groups = [name for name in mine if name.endswith("group")]
    problems = []
    if plain != theirs[: len(plain)]:
        problems.append(f"begins with {plain}, the library form with {theirs}")
    if mine != plain + groups:
        problems.append(f"group is not last: {mine}")
    if groups != [name for name in theirs if name in groups]:
        problems.append(f"groups {groups}, the library form has {theirs}")
    return problems


def arguments_out_of_order(form: type, twin: Callable) -> list[str]:
    """Arguments of a class that the library's has not, or in another order.

    Classes follow torch's, whose process_group is not the last. A LossScaler stands for
    its own arguments.
    """
    mine, theirs = (list(inspect.signature(kind).parameters) for kind in (form, twin))
    if "scaler" in theirs:
        place = theirs.index("scaler")
        theirs[place : place + 1] = inspect.signature(zero.LossScaler).parameters
    left = iter(theirs)
    return [name for name in mine if name not in left]


def form_of(path: Path) -> Callable:
    folder, name = path.parent.name, path.stem
    module = importlib.import_module(f"xtrain.whiteboard.{folder}.{name}")
    return next(v for n, v in vars(module).items() if folded(n) == folded(name))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_keeps_the_rules(name):
    of_comm = FORMS[name].parent.name == "comm"
    assert broken_rules(name, FORMS[name].read_text(), of_comm) == []


@pytest.mark.parametrize("name", FORMS)
def test_a_form_takes_the_arguments_of_the_library_form(name):
    if name in NO_TWIN:
        return
    path = FORMS[name]
    form, twin = form_of(path), TWINS[path.parent.name](name)
    if inspect.isclass(form):
        assert arguments_out_of_order(form, twin) == []
    else:
        assert differing_arguments(form, twin) == []


def test_names_are_unique_over_all_folders():
    folder = next(iter(FORMS.values())).parents[1]
    files = [f for f in folder.glob("*/*.py") if f.stem != "__init__"]
    assert len(files) == len(FORMS) > 0
    assert NO_TWIN.keys() <= FORMS.keys()


GOOD = '''"""Shift.

Computes:   what the left neighbour had.
Sends:      the tensor, to the right.
Leaves out: checks.
"""

import math

import torch.distributed as dist


def ring_shift(send, recv, group=None):
    """Shift."""
    dist.isend(send, math.floor(1)).wait()  # one; two


def _helper():
    return "a; b"
'''


def test_a_good_form_passes():
    assert broken_rules("ring_shift", GOOD, of_comm=True) == []


def test_sixty_lines_of_code_without_header_imports_and_blank_lines():
    assert (MOST_LINES, lines_of_code(GOOD)) == (60, 5)
    more = GOOD + "    # a comment counts\n" * (MOST_LINES - 5)
    asides = more.replace(
        "import math\n", "import math\n\nfrom os import (\n    path,\n)\n"
    )
    for text in (more, more + "\n\n", asides, more.replace("Leaves", "More\nLeaves")):
        assert broken_rules("ring_shift", text, of_comm=True) == []
    for line in ("    # one more\n", "\n\nTILE = 128\n"):
        broken = broken_rules("ring_shift", more + line, of_comm=True)
        assert broken == ["61 lines of code"]


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("Computes:  ", "Does:  ", "no line Computes:"),
        ("Sends:      the tensor, to the right.", "Sends:", "no line Sends:"),
        ("Leaves out:", "Omits:", "no line Leaves out:"),
        ("# one; two", "# " + "x" * 60, "wide"),
        ("import math", "import math; import os", "has a ;"),
        ("_helper", "helper", "public names"),
        ("def ring_shift", "def shift", "public names"),
        ('    """Shift."""\n', "", "has no docstring"),
        ("import math", "import numpy", "imports numpy"),
        ("import math", "from xtrain.comm import send", "imports xtrain.comm"),
        ("import math", "from . import other", "imports ."),
        ("dist.isend(", "dist.all_reduce(", "uses dist.all_reduce"),
        ("import math", "from torch.distributed import barrier", "uses dist.barrier"),
        ("dist.isend(", "dist.nn.functional.all_gather(", "uses dist.all_gather"),
        ("return ", "dist.P2POp(dist.irecv)\n    return ", "dist.isend beside them"),
    ],
)
def test_a_broken_rule_is_seen(old, new, broken):
    assert old in GOOD
    problems = broken_rules("ring_shift", GOOD.replace(old, new), of_comm=True)
    assert any(broken in problem for problem in problems), problems


def test_wrong_arguments_of_a_class_are_seen():
    class Twin:
        def __init__(self, module, stage=1, process_group=None, **defaults): ...

    class Fewer:
        def __init__(self, module, process_group=None, **defaults): ...

    class Renamed:
        def __init__(self, module, group=None, **defaults): ...

    class Swapped:
        def __init__(self, process_group, module): ...

    assert arguments_out_of_order(Fewer, Twin) == []
    assert arguments_out_of_order(Renamed, Twin)
    assert arguments_out_of_order(Swapped, Twin)


def test_wrong_arguments_are_seen():
    def twin(tensor, op=None, group=None, group_src=None): ...

    def fewer(tensor, group=None): ...

    def all_of_them(tensor, op=None, group=None): ...

    def renamed(data, group=None): ...

    def swapped(op, tensor, group=None): ...

    def group_first(group, tensor): ...

    def other_group(tensor, process_group=None): ...

    assert not differing_arguments(fewer, twin) + differing_arguments(all_of_them, twin)
    for wrong in (renamed, swapped, group_first, other_group):
        assert differing_arguments(wrong, twin), wrong
