"""Files that start a run on many machines: one `Job`, and an engine for each."""

from collections.abc import Callable

from xtrain.train.launch.job import Job
from xtrain.train.launch.jobset import jobset
from xtrain.train.launch.kubeflow import kubeflow
from xtrain.train.launch.ray import ray
from xtrain.train.launch.slurm import slurm
from xtrain.train.launch.torchrun import torchrun

ENGINES: dict[str, Callable[[Job], str]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "kubeflow": kubeflow,
    "jobset": jobset,
    "ray": ray,
}
"""By the name on the command line; each gives the text of its file."""

__all__ = ["ENGINES", "Job", "jobset", "kubeflow", "ray", "slurm", "torchrun"]
