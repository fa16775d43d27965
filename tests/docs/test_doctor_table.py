"""The page on process groups shows what `xtrain doctor` really finds."""

import sys

from xtrain_docs import config
from xtrain_docs.tables.doctor import doctor, findings


def test_the_table_is_a_run_of_the_doctor_without_this_machines_places():
    text = "\n".join(doctor().markdown())
    for name in ("torch", "gloo", "nccl", "xtrain-shm", "xtrain-socket"):
        assert f"| `{name}` |" in text
    assert text.count("two ranks all-reduced") == 3
    for place in (sys.executable, str(config.ROOT), str(config.ROOT.parent)):
        assert place not in text
    assert {"loopback", "record"} <= {found["name"] for found in findings()}
