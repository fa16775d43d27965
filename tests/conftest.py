"""One thread per process, set before torch is imported: ranks are forked."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A busy machine is no defect: nothing here fails for taking long. The same inputs are
# drawn in each run; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("xtrain", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("xtrain")

pytest_plugins = ["xtrain.testing.plugin", "pytester"]
