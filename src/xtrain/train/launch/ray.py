"""A program for Ray Train: `python FILE` where a Ray cluster is reached.

    driver -- controller -- one worker a rank, as many a node as fit

Ray makes the default process group; `xtrain train` uses the one that is there. A worker
that dies makes Ray start all of them again, `max_restarts` times. With `min_nodes` it
starts as many as it finds room for: any number of ranks, not of nodes.

Sources: https://docs.ray.io/en/latest/train/getting-started-pytorch.html,
https://docs.ray.io/en/latest/train/user-guides/elastic-training.html (from 2.54 on)
"""

from xtrain.train.elastic import fitted
from xtrain.train.launch.job import Job


def ray(job: Job) -> str:
    """The text of the program.

    ValueError if the recipe does not fit a number of ranks that Ray may start.
    """
    least = (job.min_nodes or job.nodes) * job.gpus_per_node
    for number in range(least, job.ranks):
        fitted(job.made, number)
    workers = job.ranks if job.min_nodes is None else (least, job.ranks)
    words = "".join(f"    {word!r},\n" for word in job.train)
    variables = "".join(
        f"    {name!r}: {value!r},\n" for name, value in job.variables.items()
    )
    return f'''\
"""{job.name}: {job.ranks} ranks, on {job.nodes} nodes of {job.gpus_per_node}."""

import os

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WORDS = [
    "train",
{words}]
VARIABLES = {{
{variables}}}


def train_on_each_worker() -> None:
    from xtrain.cli import main

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    code = main(WORDS)
    if code != 0:
        raise RuntimeError(f"xtrain train ended with exit code {{code}}")


if __name__ == "__main__":
    ray.init(runtime_env={{"env_vars": VARIABLES}})
    TorchTrainer(
        train_on_each_worker,
        scaling_config=ScalingConfig(
            num_workers={workers}, use_gpu={job.on_gpus}, placement_strategy="PACK"
        ),
        run_config=RunConfig(
            name={job.name!r},
            storage_path={job.folder!r},
            failure_config=FailureConfig(max_failures={job.max_restarts}),
        ),
    ).fit()
'''
