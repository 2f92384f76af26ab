"""Imports inside tileflow go one way, and importing it needs NumPy alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tileflow"

# A module may import from its own layer and from those above it in this list.
LAYERS = [
    {"version", "errors", "config", "faults"},
    {"protocol", "trace", "reference"},
    {"routing", "plan"},
    {"costmodel", "jit"},
    {"buffers", "worlds", "partition"},
    {"backends"},
    {"engine"},
    {"layer"},
    {"timing", "__init__"},
    {"probes"},
    {"doctor"},
    {"bench"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Modules that a type checker alone imports from below.
OPTIONAL = ("cupy", "cuda", "mpi4py", "nvshmem", "ml_dtypes", "rich", "matplotlib", "torch")


def top_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def internal_imports(path: Path) -> set[str]:
    """Return the top-level tileflow modules that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    package = ("tileflow", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and not under_type_checking(tree, node):
            base = package[: len(package) - node.level + 1]
            full = (*base, *(node.module or "").split("."))
            names = [full[1]] if len(full) > 1 and full[1] else [a.name for a in node.names]
            found.update(names)
    return found


def under_type_checking(tree: ast.AST, node: ast.AST) -> bool:
    guards = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    return any(node in ast.walk(guard) for guard in guards)


def test_every_module_has_a_layer():
    assert {top_name(path) for path in PACKAGE.rglob("*.py")} <= set(RANK) | {"__main__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_a_module_imports_nothing_from_a_lower_layer(path):
    mine = RANK.get(top_name(path), len(LAYERS))
    for name in internal_imports(path):
        assert name not in RANK or RANK[name] <= mine, f"{path.name} imports {name}"


def test_importing_tileflow_loads_no_optional_package():
    code = f"import sys, tileflow; print([m for m in {OPTIONAL!r} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr
