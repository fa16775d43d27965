"""Lines of shell that torchrun, Slurm and Kubernetes share.

    node 0                     node 1 ... n-1
    torchrun --- c10d store <--- torchrun          one agent a node
     | | |                        | | |
     ranks                        ranks            RANK, WORLD_SIZE, MASTER_ADDR set

A rank that dies ends its agent's ranks; all agents meet again at the store and start
their ranks anew, `max_restarts` times. The store is in node 0's agent, and told so by
is_host: a node does not know itself by every name that others call it.

With --nnodes=MIN:MAX they wait 30 s for more than MIN nodes, and go on without those
that are lost. A node that comes later makes all start again: ranks get SIGTERM, save,
and take up the step that they left. Without node 0 there is no store, and no run.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from shlex import quote

from xtrain.train.launch.job import Job

JOIN = " \\\n  "
"""Goes on in the next line of a command."""
PATIENCE = 600
"""Seconds that an agent waits for node 0: images are pulled at different speeds."""


def exports(job: Job) -> str:
    """A line for each variable of the environment."""
    return "\n".join(
        f"export {name}={quote(value)}" for name, value in job.variables.items()
    )


def agent(is_host: str) -> str:
    """The beginning of a torchrun command.

    Args:
        is_host: shell text that is 1 on the node of the store, and 0 on others.
    """
    return f'exec torchrun --rdzv-conf="is_host={is_host},read_timeout={PATIENCE}"'


def arguments(job: Job, host: str, run: str, nodes: str = "") -> str:
    """All other words of the torchrun command, on several lines.

    Args:
        host: shell text, the address of the first node.
        run: shell text that is equal on the nodes of one start of the job.
        nodes: shell text, how many; those of the job unless given.
    """
    lines = [
        f"--nnodes={nodes or job.nodes_taken} --nproc-per-node={job.gpus_per_node}",
        f"--max-restarts={job.max_restarts}",
        f'--rdzv-backend=c10d --rdzv-id="{run}"',
        f'--rdzv-endpoint="{host}:{job.port}"',
        "-m xtrain train",
        *map(quote, job.train),
    ]
    return JOIN.join(lines)
