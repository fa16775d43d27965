"""One thread per process, set before torch is imported: ranks are forked."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A busy machine is no defect: nothing here fails for taking long.
settings.register_profile("xtrain", deadline=None)
settings.load_profile("xtrain")

pytest_plugins = ["xtrain.testing.plugin", "pytester"]
