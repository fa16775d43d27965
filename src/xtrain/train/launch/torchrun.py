"""A script to start by hand, or over ssh, on each node.

    node 0:  bash job.sh 0 HOST      HOST is the name or address of node 0
    node 1:  bash job.sh 1 HOST

A signal reaches torchrun itself, for the shell becomes it (`exec`); it ends its ranks.
Ranks meet at the host name of node 0; where that is not found, PET_LOCAL_ADDR=ADDRESS
on each node gives torchrun another one. With `min_nodes`, a node that was lost comes
back by the same command.
"""

from xtrain.train.launch.job import Job
from xtrain.train.launch.shell import JOIN, agent, arguments, exports


def torchrun(job: Job) -> str:
    """The text of the script."""
    command = JOIN.join([agent("$((NODE == 0))"), arguments(job, "$HOST", job.name)])
    return f"""\
#!/bin/bash
# {job.name}: {job.nodes} nodes of {job.gpus_per_node} ranks. On node N, from 0 to \
{job.nodes - 1}:
#   bash FILE N HOST     with HOST, the name or address of node 0
set -eu
NODE=${{1:?the number of this node, from 0}}
HOST=${{2:?the name or address of node 0}}

{exports(job)}

{command}
"""
