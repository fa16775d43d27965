"""What JobSet and Kubeflow share: an Indexed Job with a pod a node.

    JobSet NAME -- Job NAME-node-0 -- pod NAME-node-0-0, host NAME-node-0-0.NAME
                                   `- pod NAME-node-0-1 ...

A rank that fails is started again inside the pods. A pod that fails ends its Job, and
JobSet makes all pods anew, up to `max_restarts` times; one that was evicted (condition
DisruptionTarget) does not count, and the end of `hours` is final. With `min_nodes` the
run begins though some pods wait for a node; they join when they have one. /dev/shm is
memory: NCCL needs more of it than the 64 MiB of a container.

Sources: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/,
https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

import json
import re
from textwrap import indent

from xtrain.train.launch.job import GRACE, Job
from xtrain.train.launch.shell import JOIN, agent, arguments


def quoted(text: str) -> str:
    """As a YAML scalar in double quotes, which is JSON's where text is printable."""
    return json.dumps(text, ensure_ascii=False)


def literal(script: str) -> str:
    """Kubernetes replaces $(NAME) in words and variables, and makes $$ a $."""
    return re.sub(r"\$(?=[$(])", "$$", script)


def failure_policy(job: Job) -> str:
    """Of a JobSet: which ends of a Job start all Jobs again."""
    return f"""\
failurePolicy:
  maxRestarts: {job.max_restarts}
  rules:
  - name: evicted
    action: RestartJobSetAndIgnoreMaxRestarts
    onJobFailureReasons: [PodFailurePolicy]
  - name: time_is_up
    action: FailJobSet
    onJobFailureReasons: [DeadlineExceeded]
"""


def job_spec(job: Job) -> str:
    """Of the Job: as many pods as nodes, which fail together."""
    return f"""\
completionMode: Indexed
completions: {job.nodes}
parallelism: {job.nodes}
backoffLimit: 0
activeDeadlineSeconds: {job.seconds}
podFailurePolicy:
  rules:
  - action: FailJob
    onPodConditions:
    - type: DisruptionTarget
      status: "True"
template:
  spec:
{indent(pod_spec(job), "    ")}"""


def pod_spec(job: Job) -> str:
    """Of a pod: torchrun as its first process, which gets SIGTERM itself."""
    host = f"{job.name}-node-0-0.{job.name}"
    command = JOIN.join(
        [agent("$((JOB_COMPLETION_INDEX == 0))"), arguments(job, host, job.name)]
    )
    variables = "".join(
        f"  - name: {name}\n    value: {quoted(literal(value))}\n"
        for name, value in job.variables.items()
    )
    gpus = f"""\
  resources:
    limits:
      nvidia.com/gpu: {job.gpus_per_node}
"""
    return f"""\
restartPolicy: Never
terminationGracePeriodSeconds: {GRACE}
containers:
- name: node
  image: {quoted(job.image)}
  command: [bash, -c]
  args:
  - |
{indent(literal(command), "    ")}
  env:
{variables}\
  ports:
  - containerPort: {job.port}
{gpus if job.on_gpus else ""}\
  volumeMounts:
  - name: shared
    mountPath: {quoted(job.folder)}
  - name: dshm
    mountPath: /dev/shm
volumes:
- name: shared
  persistentVolumeClaim:
    claimName: {job.claim}
- name: dshm
  emptyDir:
    medium: Memory
"""
