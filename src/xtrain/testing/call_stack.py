"""The call stack of a rank, and one line for it: the call, its peer, its caller.

    test -> ring_shift -> dist.recv(src=0) -> C++      (innermost call last)

    "waiting in recv(tensor=float32[4], src=0), in ring_shift (comm/p2p.py:41)"

Two sources: live frames, which know their arguments, and the text faulthandler
writes, which does not.
"""

import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_COMM = os.path.join(_TORCH, "distributed") + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_HARNESS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WATCHER = os.path.join(_HARNESS, "watcher.py")
_XTRAIN = os.path.dirname(os.path.dirname(_HARNESS)) + os.sep
_OUR_COMM = os.path.join(_XTRAIN, "comm")
_BACKENDS = os.path.join(_XTRAIN, "backends")  # below torch: where calls wait
# Arguments that tell who talks to whom; the rest of a call is noise in a report.
_TELLING = {"src", "dst", "group_src", "group_dst", "peer", "op", "group", "tensor"}
_TELLING |= {"output", "input", "send", "recv", "obj", "object_list"}
# Code of decorators: their frames are no calls of the program.
_DECORATING = "typing_extensions.py"
_WRAPPERS = frozenset({"wrapper", "_fn", "inner", "decorate_context"})
_FAULT_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_FAULT_FAILED = re.compile(r"^Current thread .*\n(?:^ .*\n)*", re.MULTILINE)
_FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CallStack:
    """`frames` is a traceback with the innermost call last; `summary` is one line."""

    frames: str
    summary: str


def stack_of(innermost: FrameType) -> CallStack:
    """The stack that ends in `innermost`, without the frames of the harness."""
    shown: list[traceback.FrameSummary] = []
    for entry in traceback.extract_stack(innermost):
        # Frames outside the harness belong to the process that forked the rank.
        shown = [] if is_harness(entry.filename) else [*shown, entry]
    return CallStack("".join(traceback.format_list(shown)), summary_of(innermost))


def summary_of(innermost: FrameType) -> str:
    """One line for the frame a rank is executing."""
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None and not is_harness(frame.f_code.co_filename):
        frames.append(frame)
        frame = frame.f_back
    own = [f for f in frames if not _is_library(f.f_code.co_filename)]
    for depth, frame in enumerate(frames):
        code = frame.f_code
        if code.co_filename.startswith(_TORCH_COMM) and code.co_name not in _WRAPPERS:
            caller = next((f for f in frames[depth:] if f in own), frame)
            return f"waiting in {code.co_name}({_arguments(frame)}), {_in(caller)}"
    if own:
        source = _source(own[0])
        comm = own[0].f_code.co_filename.startswith(_OUR_COMM)
        verb = "waiting" if comm or ".wait(" in source else "busy"
        return f"{verb} in `{source}`, {_in(own[0])}"
    return "between two runs"


def stack_of_fault(text: str) -> CallStack | None:
    """The stack in faulthandler's report; None when the text holds none.

    The report lists every thread, innermost call first, the main thread last: of a
    report that is still being written, the watcher's may be all there is.
    """
    for thread in reversed(_FAULT_THREAD.split(text)):
        calls = _FAULT_CALL.findall(thread)
        if any(is_harness(file) and file != _WATCHER for file, _, _ in calls):
            break
    else:
        return None
    outer = next(i for i, call in enumerate(calls) if is_harness(call[0]))
    calls = calls[:outer]
    if not calls:
        return CallStack("", "between two runs")
    comm = [
        name
        for file, _, name in calls
        if file.startswith(_TORCH_COMM) and name not in _WRAPPERS
    ]
    own = next((call for call in calls if not _is_library(call[0])), calls[0])
    what = f"waiting in {comm[0]}()" if comm else "busy"
    frames = [f'  File "{f}", line {line}, in {name}\n' for f, line, name in calls]
    return CallStack(
        "".join(reversed(frames)), f"{what}, in {own[2]} ({short(own[0])}:{own[1]})"
    )


def other_thread(text: str) -> str:
    """faulthandler's report of the thread that failed, if that is not the rank's."""
    failed = _FAULT_FAILED.search(text)
    if failed is None or any(
        is_harness(f) for f, _, _ in _FAULT_CALL.findall(failed[0])
    ):
        return ""
    return f"  in another of its threads:\n{failed[0]}"


def is_harness(file: str) -> bool:
    """Whether this source file belongs to the machinery around a rank's function."""
    return file.startswith((_HARNESS, _STDLIB + "multiprocessing", "<frozen"))


def short(file: str) -> str:
    """The path as a reader would type it from the current directory."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _arguments(frame: FrameType) -> str:
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    shown = [name for name in names if name in _TELLING]
    unsaid = (None, torch.distributed.group.WORLD)
    return ", ".join(
        f"{name}={_brief(values[name])}"
        for name in shown
        if not any(values.get(name) is value for value in unsaid)
    )


def _brief(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    if isinstance(value, torch.distributed.ProcessGroup):
        return repr(value.group_name)
    text = str(value).removeprefix("RedOpType.")
    return text if len(text) <= 40 else text[:37] + "..."


def _in(frame: FrameType) -> str:
    code = frame.f_code
    arguments = _arguments(frame)
    name = f"{code.co_name}({arguments})" if arguments else code.co_name
    return f"in {name} ({short(code.co_filename)}:{frame.f_lineno})"


def _source(frame: FrameType) -> str:
    entry = traceback.extract_stack(frame, limit=1)[0]
    return entry.line or frame.f_code.co_name


def _is_library(file: str) -> bool:
    inside = (_TORCH, _STDLIB, _BACKENDS, "<")
    return file.startswith(inside) or file.endswith(_DECORATING)
