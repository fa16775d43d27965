# python snippets/wrong/lc1/file_named_profile.py
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    training = Path(folder, "train.py")
    training.write_text("import cProfile\nprint('trained')\n")
    # Python looks beside the script first, and cProfile imports a module `profile`.
    for name in ("profile_collectives.py", "profile.py"):  # the bug: the second name
        Path(folder, name).write_text("print('measuring')\n")
        run = subprocess.run([sys.executable, training], capture_output=True, text=True)
        said = (run.stderr or run.stdout).splitlines()[-1].partition(" (")[0]
        print(f"train.py beside {name}: {said}")
