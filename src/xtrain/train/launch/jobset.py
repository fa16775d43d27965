"""A JobSet for Kubernetes: `kubectl apply -f FILE`.

JobSet makes the headless service `subdomain`, under which pods find the first one.

Source: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from textwrap import indent

from xtrain.train.launch.job import Job
from xtrain.train.launch.kubernetes import failure_policy, job_spec


def jobset(job: Job) -> str:
    """The text of the YAML file."""
    return f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {job.name}
    publishNotReadyAddresses: true
{indent(failure_policy(job), "  ")}\
  replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec:
{indent(job_spec(job), "        ")}"""
