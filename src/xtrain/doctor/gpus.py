"""The GPUs that ranks could run on, and whether NCCL lets several ranks share one."""

from xtrain.doctor.finding import Finding

MULTI_RANK_NCCL = (2, 30)
"""From this NCCL on, several ranks may share one GPU."""


def check_gpus() -> Finding:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            return Finding("gpus", "note", "none visible; ranks run on the CPU")
        return Finding("gpus", "note", "none: this torch is a CPU build")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = ", ".join(sorted(set(names)))
    return Finding("gpus", "ok", f"{len(names)}: {kinds}; try: make verify-gpu")


def _nccl_version() -> tuple[int, ...] | None:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return tuple(torch.cuda.nccl.version())


def check_nccl() -> Finding:
    import torch.distributed as dist

    version = _nccl_version()
    if version is not None:
        return Finding("nccl", "ok", ".".join(map(str, version)))
    why = "no GPU to use it on" if dist.is_nccl_available() else "not in this torch"
    return Finding("nccl", "note", f"{why}; the tests run on gloo")


def check_sharing() -> Finding:
    """May several ranks use one GPU? Then one GPU is enough to verify on."""
    version = _nccl_version()
    if version is None:
        return Finding("sharing", "note", "without NCCL no GPU is shared among ranks")
    text = ".".join(map(str, version))
    if version[:2] < MULTI_RANK_NCCL:
        return Finding(
            "sharing",
            "note",
            f"NCCL {text} wants a GPU per rank; 2.30 can share one",
        )
    return Finding("sharing", "ok", f"several ranks may share one GPU (NCCL {text})")
