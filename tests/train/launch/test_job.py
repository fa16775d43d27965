"""What a job is made of, what it refuses, and `xtrain launch`."""

import re

import pytest

from tests.train.launch.scripts import job_of
from xtrain.cli import main
from xtrain.train.launch import ENGINES, slurm

JOB = "xtrain.train.launch.job:Job"


@pytest.mark.verifies(JOB)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": 3}, "the layout has 4 ranks, and nodes=3 x gpus_per_node=2 are 6"),
        ({"options": ("--layout.pipeline=2",)}, "the layout has 2 ranks"),
        ({"nodes": 0}, "nodes=0"),
        ({"min_nodes": 0}, "min_nodes=0"),
        ({"min_nodes": 3}, "min_nodes=3 is above nodes=2"),
        (
            {"min_nodes": 1, "options": ("--layout.tensor=4",)},
            "elastic: 2 ranks are no multiple of pipeline 1 x context 1 x tensor 4",
        ),
        ({"gpus_per_node": True}, "gpus_per_node=True"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"hours": 0}, "hours=0"),
        ({"port": 80}, "port=80"),
        ({"port": 70000}, "port=70000 is above 65535"),
        ({"name": "Run"}, "name='Run' is not a DNS label"),
        ({"name": "a" * 41}, "is not a DNS label"),
        ({"claim": "a: b"}, "claim='a: b' is not a DNS label"),
        ({"image": "a b"}, "image='a b'"),
        ({"folder": "here"}, "folder='here' is not an absolute path"),
        ({"folder": "/"}, "folder='/' is not an absolute path"),
        ({"folder": "/a\nb"}, "has a line break"),
        ({"environment": {"A-B": "1"}}, "'A-B' is not the name of a variable"),
        ({"environment": {"A": "\x07"}}, "not printable"),
        ({"options": ("--sample.prompt=a\u2028b",)}, "has a line break"),
        ({"options": ("--checkpoint.folder=none",)}, "checkpoint.folder is none"),
        ({"options": ("--checkpoint.resume=x",)}, "checkpoint.resume='x' is not auto"),
        ({"options": ("--layout.dta=4",)}, "did you mean --layout.data"),
        ({"recipe": "byte"}, "did you mean bytes"),
    ],
)
def test_what_does_not_fit_is_refused(changes, told):
    options = changes.get("options", ())
    if options and not options[0].startswith("--layout"):
        changes = changes | {"options": ("--layout.data=4", *options)}
    with pytest.raises(ValueError, match=re.escape(told)):
        job_of(**changes)


@pytest.mark.verifies(JOB)
def test_a_restart_has_a_checkpoint_to_go_on_from():
    assert job_of(folder="/nfs/").train == [
        "bytes", "--checkpoint.folder=/nfs/run-1", "--layout.data=4",
        "--checkpoint.every=16", "--checkpoint.resume=auto",
    ]  # fmt: skip
    own = ("--layout.data=4", "--checkpoint.folder=/a", "--checkpoint.every=3")
    made = job_of(options=own)
    assert made.made.checkpoint.folder == "/a" and made.train[-2:] == [
        "--checkpoint.every=3",
        "--checkpoint.resume=auto",
    ]
    assert job_of(min_nodes=1).made.elastic and job_of(min_nodes=1).nodes_taken == "1:2"
    assert job_of(environment={"NCCL_DEBUG": "INFO"}).variables["NCCL_DEBUG"] == "INFO"


@pytest.mark.verifies("xtrain.cli.launch:run")
def test_the_command_prints_the_file(capsys):
    words = ["bytes", "--layout.data=4", "--nodes=2", "--env=A=b=c", "--min-nodes=1"]
    settings = ["--engine=slurm", "--gpus-per-node=2", "--name=run-1"]
    assert main(["launch", *settings, *words]) == 0
    assert capsys.readouterr().out == slurm(
        job_of(environment={"A": "b=c"}, min_nodes=1)
    )


@pytest.mark.verifies("xtrain.cli.launch:run")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required: --engine"),
        (["--engine", "pbs", "bytes"], "invalid choice: 'pbs'"),
        (["--engine", "ray"], "no RECIPE"),
        (["--engine", "ray", "--layout.data=8"], "no RECIPE"),
        (["--engine", "ray", "bytes"], "the layout has 1 ranks"),
        (["--engine", "ray", "bytes", "--env", "A"], "--env A is not of the form"),
    ],
)
def test_a_mistake_is_one_line(words, told, capsys):
    try:
        code = main(["launch", *words])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and told in said.err and said.err.count("\n") == 1


@pytest.mark.verifies("xtrain.cli.launch:run")
def test_help_names_every_engine(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and all(name in told for name in ENGINES)
