"""A TrainJob for Kubeflow Trainer v2, with the runtime that it refers to.

    TrainJob NAME -- runtimeRef --> TrainingRuntime NAME -- template --> JobSet NAME

The runtime comes along, because restarts, grace and volumes are its part; fields of a
TrainJob that patch them differ between versions 2.0 and 2.2.

Sources: https://www.kubeflow.org/docs/components/trainer/operator-guides/runtime/,
github.com/kubeflow/trainer, pkg/apis/trainer/v1alpha1
"""

from textwrap import indent

from xtrain.train.launch.job import Job
from xtrain.train.launch.kubernetes import failure_policy, job_spec


def kubeflow(job: Job) -> str:
    """The text of the YAML file, two documents."""
    return f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {job.name}
  labels:
    trainer.kubeflow.org/framework: torch
spec:
  mlPolicy:
    numNodes: {job.nodes}
    torch: {{}}
  template:
    spec:
      network:
        enableDNSHostnames: true
        publishNotReadyAddresses: true
{indent(failure_policy(job), "      ")}\
      replicatedJobs:
      - name: node
        replicas: 1
        template:
          metadata:
            labels:
              trainer.kubeflow.org/trainjob-ancestor-step: trainer
          spec:
{indent(job_spec(job), "            ")}\
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {job.name}
  trainer:
    numNodes: {job.nodes}
    numProcPerNode: {job.gpus_per_node}
"""
