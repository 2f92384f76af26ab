"""The MPI environment for Python callers: runs tools/mpi_env.sh, which alone holds it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_mpirun", "mpi_environment"]

SCRIPT = Path(__file__).with_name("mpi_env.sh")
_DUMP = "import json, os; print(json.dumps(dict(os.environ)))"
_SHELL = '. "$0" && exec "$1" -c "$2"'


def mpi_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that the script sets on top of `base` (the process's environment).

    Those that `base` already holds keep their value and are not returned.
    """
    before = dict(os.environ if base is None else base)
    command = ["sh", "-c", _SHELL, str(SCRIPT), sys.executable, _DUMP]
    text = subprocess.run(command, env=before, check=True, capture_output=True, timeout=60).stdout
    after = json.loads(text)
    own = ("_", "PWD", "OLDPWD", "SHLVL", "LC_CTYPE")  # of the shell and of Python themselves
    return {k: v for k, v in after.items() if before.get(k) != v and k not in own}


def find_mpirun() -> str | None:
    """Return the `mpirun` beside this interpreter, else the one on PATH, else None."""
    beside = shutil.which("mpirun", path=os.fspath(Path(sys.executable).parent))
    return beside or shutil.which("mpirun")


if __name__ == "__main__":
    for name, value in mpi_environment().items():
        print(f"{name}={value}")
