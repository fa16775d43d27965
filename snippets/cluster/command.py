# python snippets/cluster/command.py
from xtrain.cli import main

script = "snippets/cluster/torch_ddp.py"
# the same as: xtrain cluster snippets/cluster/torch_ddp.py --ranks 64 ...
main(["cluster", script, "--ranks", "64", "--accelerator", "h100"])
