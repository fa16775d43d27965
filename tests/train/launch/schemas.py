"""The parts of the schemas that our files use, and a check.

Sources, read in November 2026:
- JobSet: github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go
- Job and Pod: kubernetes.io/docs/reference/kubernetes-api/workload-resources/
- TrainJob, TrainingRuntime: github.com/kubeflow/trainer, pkg/apis/trainer/v1alpha1
- sbatch: slurm.schedmd.com/sbatch.html
- Ray: docs.ray.io/en/latest/train/api/config.html

A dict has these fields, those with ? may be missing; a list holds any number; a set
lists all values; a str is a regular expression.
"""

import re
from typing import Any

LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
METADATA = {"name": LABEL, "labels?": dict}
# fmt: off
CONTAINER = {
    "name": LABEL, "image": r"\S+", "command": [str], "args": [str],
    "env": [{"name": "[A-Za-z_][A-Za-z0-9_]*", "value": str}],
    "ports": [{"containerPort": int}],
    "resources?": {"limits": {"nvidia.com/gpu": int}},
    "volumeMounts": [{"name": LABEL, "mountPath": "/.*"}],
}
VOLUME = {
    "name": LABEL, "persistentVolumeClaim?": {"claimName": LABEL},
    "emptyDir?": {"medium": {"", "Memory"}},
}
POD = {
    "restartPolicy": {"Never"},  # of podFailurePolicy
    "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
    "volumes": [VOLUME],
}
POD_RULE = {
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "onPodConditions": [{"type": str, "status": {"True", "False", "Unknown"}}],
}
JOB = {
    "completionMode": {"Indexed"}, "completions": int, "parallelism": int,
    "backoffLimit": int, "activeDeadlineSeconds": int,
    "podFailurePolicy": {"rules": [POD_RULE]}, "template": {"spec": POD},
}
JOB_RULE = {
    "name": r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?",
    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
    "onJobFailureReasons": [{
        "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes",
        "MaxFailedIndexesExceeded", "PodFailurePolicy",
    }],
}
JOB_SET_SPEC = {
    "network": {
        "enableDNSHostnames": bool, "subdomain?": LABEL,
        "publishNotReadyAddresses": bool,
    },
    "failurePolicy": {"maxRestarts": int, "rules": [JOB_RULE]},
    "replicatedJobs": [{
        "name": LABEL, "replicas": int,
        "template": {"metadata?": {"labels": dict}, "spec": JOB},
    }],
}
JOB_SET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"}, "kind": {"JobSet"},
    "metadata": METADATA, "spec": JOB_SET_SPEC,
}
TRAINING_RUNTIME = {
    "apiVersion": {"trainer.kubeflow.org/v1alpha1"}, "kind": {"TrainingRuntime"},
    "metadata": METADATA,
    "spec": {
        "mlPolicy": {"numNodes": int, "torch": dict},
        "template": {"spec": JOB_SET_SPEC},
    },
}
RUNTIME = {
    "apiGroup": {"trainer.kubeflow.org"}, "name": LABEL,
    "kind": {"TrainingRuntime", "ClusterTrainingRuntime"},
}
TRAIN_JOB = {
    "apiVersion": {"trainer.kubeflow.org/v1alpha1"}, "kind": {"TrainJob"},
    "metadata": METADATA,
    "spec": {
        "runtimeRef": RUNTIME, "trainer": {"numNodes": int, "numProcPerNode": int},
    },
}
# fmt: on
SBATCH = {
    "--job-name",
    "--nodes",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--exclusive",
    "--time",
    "--requeue",
    "--open-mode",
    "--output",
    "--signal",
}  # fmt: skip
RAY = {
    "ScalingConfig": {"num_workers", "use_gpu", "placement_strategy"},
    "RunConfig": {"name", "storage_path", "failure_config"},
    "FailureConfig": {"max_failures"},
}


def check(value: Any, shape: Any, path: str = "") -> None:
    """AssertionError that names the field which is not of the shape."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), path
        names = {name.rstrip("?"): name for name in shape}
        assert value.keys() <= names.keys(), f"{path}: {value.keys() - names.keys()}"
        for name, marked in names.items():
            assert name in value or marked.endswith("?"), f"{path} has no {name}"
            if name in value:
                check(value[name], shape[marked], f"{path}/{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list) and value, path
        for one in value:
            check(one, shape[0], path)
    elif isinstance(shape, set):
        assert value in shape, f"{path}={value!r}"
    elif isinstance(shape, str):
        assert isinstance(value, str) and re.fullmatch(shape, value), f"{path}={value}"
    else:
        assert type(value) is shape, f"{path}={value!r}"
