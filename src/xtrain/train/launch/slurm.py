"""A batch script for Slurm: a task a node, each a torchrun.

    sbatch: batch shell on node 0 -- srun --+-- node 0: torchrun -- ranks
                                            `-- node 1: torchrun -- ranks

Three things end it before the run is over:
- A rank fails: torchrun starts all ranks again. If a torchrun gives up, srun ends the
  other nodes (--kill-on-bad-exit), and the job has failed.
- A node is lost, or the job is preempted: Slurm puts it into the queue (--requeue).
  It starts again on `nodes`, or with `min_nodes` on as many as there are.
- Time is nearly up: the batch shell gets SIGUSR1 GRACE seconds before. It has SIGTERM
  sent to every torchrun, waits, and puts the job into the queue. SIGTERM to the shell
  would not do, for `scancel` sends it too, and a cancelled job must not come back;
  SIGTERM to srun would not do, for srun then kills the step.

Sources: https://slurm.schedmd.com/sbatch.html, srun.html, scancel.html
"""

import math

from xtrain.train.launch.job import GRACE, Job
from xtrain.train.launch.shell import JOIN, agent, arguments, exports


def slurm(job: Job) -> str:
    """The text of the script for sbatch."""
    inner = JOIN.join([agent("$((SLURM_NODEID == 0))"), '"$@"'])
    command = JOIN.join(
        [
            "srun --kill-on-bad-exit=1 --cpu-bind=none bash -c",
            f"'{inner}' torchrun",
            arguments(job, "$HOST", "$SLURM_JOB_ID", nodes(job)),
        ]
    )
    return f"""\
#!/bin/bash
{directives(job)}
set -u
{exports(job)}
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

{command} &
STEP=$!
LATE=
trap 'LATE=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1  # time is nearly up
trap : TERM  # preempted or cancelled: Slurm signals the step too
while kill -0 "$STEP" 2>/dev/null; do  # a signal ends a wait early
  wait "$STEP"
done
wait "$STEP"
CODE=$?
if [ -n "$LATE" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
"""


def nodes(job: Job) -> str:
    """Those that Slurm has given, where it may give fewer."""
    return "" if job.min_nodes is None else "$SLURM_JOB_NUM_NODES"


def directives(job: Job) -> str:
    """What sbatch reads; its own options come before these."""
    options = [
        f"job-name={job.name}",
        f"nodes={job.nodes_taken.replace(':', '-')}",
        "ntasks-per-node=1",
        *([f"gpus-per-node={job.gpus_per_node}"] if job.on_gpus else []),
        "exclusive",
        f"time={math.ceil(job.seconds / 60)}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
        f"signal=B:USR1@{GRACE}",
    ]
    return "\n".join(f"#SBATCH --{option}" for option in options)
