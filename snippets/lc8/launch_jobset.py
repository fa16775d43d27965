# python snippets/lc8/launch_jobset.py
from xtrain.cli import main

JOB = "--nodes 8 --min-nodes 6 --name run"
RECIPE = "bytes --layout.data=64 --layout.zero=3 --global_batch=512"
main(f"launch --engine jobset {JOB} {RECIPE}".split())
