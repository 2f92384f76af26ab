"""Make a virtual environment and install tileflow there, in no time where that was done before.

Needs the standard library alone and says what to install where the machine lacks a part of Python.

    python tools/install.py --venv .venv --extras mpi,test
    python tools/install.py --no-venv --extras mpi,test

With ``--no-venv`` the extras' requirements go into the running interpreter; tileflow itself does
not (the Makefile puts the checkout on PYTHONPATH).
"""

import sys

if sys.version_info < (3, 10) or sys.version_info >= (3, 14):
    sys.exit(
        "tileflow needs Python 3.10 to 3.13, this is {}.{}; name another one: "
        "make PYTHON=python3.12 ...".format(*sys.version_info)
    )

import argparse
import hashlib
import importlib.util
import json
import re
import runpy
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PIP = (21, 3)  # the first that installs a checkout in editable form by pyproject.toml
STAMP = "tileflow-installed.json"


class SetupError(Exception):
    """The machine lacks something; the text says what to install."""


def make_venv(folder, has_ensurepip=None):
    """Create the environment unless it is there; return its interpreter."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    if has_ensurepip is None:
        has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    if not has_ensurepip:
        name = "python{}.{}-venv".format(*sys.version_info)
        raise SetupError(
            f"{sys.executable} cannot make environments: its module ensurepip is missing. "
            f"Install it (Debian, Ubuntu: apt-get install {name}) or use NO_VENV=1"
        )
    print(f"making {folder} with {sys.executable}", file=sys.stderr, flush=True)
    if subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False).returncode:
        raise SetupError(f"{sys.executable} -m venv {folder} failed (see above); or use NO_VENV=1")
    return python


def check_same_python(folder):
    """Refuse an environment that another Python than the one asked for made."""
    text = (folder / "pyvenv.cfg").read_text(encoding="utf-8")
    found = re.search(r"^version\w* *= *(\d+\.\d+)", text, re.MULTILINE)
    asked = "{}.{}".format(*sys.version_info)
    if found and found.group(1) != asked:
        raise SetupError(
            f"{folder} holds Python {found.group(1)}, PYTHON is {asked}: "
            f"remove {folder} or name another one with VENV="
        )


def pip_version(python):
    """Return pip's version as a pair, or None where there is no pip."""
    command = [str(python), "-m", "pip", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"pip (\d+)\.(\d+)", done.stdout)
    return (int(found.group(1)), int(found.group(2))) if found else None


def check_pip(python, in_venv):
    """Bring an environment's pip up to date where needed; say how for another interpreter."""
    version = pip_version(python)
    if version is None:
        raise SetupError(
            f"{python} has no pip: {python} -m ensurepip, or on Debian and Ubuntu "
            "apt-get install python3-pip"
        )
    if version >= MIN_PIP:
        return
    upgrade = [str(python), "-m", "pip", "install", "--upgrade", "pip"]
    if not in_venv or subprocess.run(upgrade, check=False).returncode:
        spoken = "pip {}.{} is too old, {}.{} is needed".format(*version, *MIN_PIP)
        raise SetupError(f"{spoken}: {' '.join(upgrade)}")


def metadata_key():
    """Return a hash of everything that decides what an install does."""
    names = ("setup.py", "pyproject.toml", "tileflow/version.py")
    texts = [(ROOT / name).read_bytes() for name in names]
    return hashlib.sha256(b"\0".join([str(ROOT).encode(), *texts])).hexdigest()


def read_stamp(path, key):
    """Return the extras that a stamp of this key lists."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
        return set(stamp["extras"]) if stamp["key"] == key else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def install(python, targets):
    """Let pip install the targets."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *targets]
    if not sys.stdout.isatty():
        command.append("--quiet")
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SetupError(
            f"pip failed (see above): {' '.join(command)}\n"
            "To run with what is installed already: make ... NO_INSTALL=1 (and NO_VENV=1)"
        )


def install_in_venv(folder, extras):
    """Install tileflow in editable form with its extras, unless the stamp says it was done."""
    python = make_venv(folder)
    stamp, key = folder / STAMP, metadata_key()
    had = read_stamp(stamp, key)
    if had >= extras:
        return
    check_pip(python, in_venv=True)
    target = ".[{}]".format(",".join(sorted(extras)))
    print(f"installing {target} in {folder} (minutes, the first time)", file=sys.stderr, flush=True)
    install(python, ["--editable", target])
    stamp.write_text(json.dumps({"key": key, "extras": sorted(had | extras)}), encoding="utf-8")


def install_here(extras):
    """Install the requirements into this interpreter; nothing is asked for where all are there."""
    lists = runpy.run_path(str(ROOT / "setup.py"))
    wanted = [*lists["CORE"], *(line for name in sorted(extras) for line in lists["EXTRAS"][name])]
    check_pip(sys.executable, in_venv=False)
    install(sys.executable, list(dict.fromkeys(wanted)))


def parse_extras(text):
    """Return the set of extras in a list like ``mpi,test``; raise SetupError for unknown ones."""
    extras = {name for name in text.split(",") if name}
    known = set(runpy.run_path(str(ROOT / "setup.py"))["EXTRAS"])
    if extras - known:
        wrong = ", ".join(sorted(extras - known))
        raise SetupError(f"no such extra: {wrong}; there are {', '.join(sorted(known))}")
    return extras


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--no-venv", action="store_true", help="use this interpreter")
    parser.add_argument("--same-python", action="store_true", help="refuse another one's venv")
    parser.add_argument("--extras", default="", help="for example mpi,test")
    args = parser.parse_args(argv)
    try:
        extras = parse_extras(args.extras)
        if args.no_venv:
            install_here(extras)
            return
        if args.same_python and args.venv.exists():
            check_same_python(args.venv)
        install_in_venv(args.venv, extras)
    except SetupError as error:
        sys.exit(f"install: {error}")


if __name__ == "__main__":
    main()
