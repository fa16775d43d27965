# python snippets/lc5/command.py
from xtrain.cli import main

# the same as: xtrain schedule zb_h1 --stages 4 --micro-batches 6
main(["schedule", "zb_h1", "--stages", "4", "--micro-batches", "6"])
