"""One thread per process, set before torch is imported: ranks are forked."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["xtrain.testing.plugin", "pytester"]
