"""A room imports only what stands below it, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvern"

# From the ground up. A room may import rooms of the same line only if it is the same room.
FLOORS = [
    ["config", "sampling_params", "clock", "log", "outputs"],
    ["request"],
    ["step"],
    ["kernels"],
    ["cache", "weights"],
    ["scheduler", "layers", "tokenizer"],
    ["models", "sampling"],
    ["speculative"],
    ["runner"],
    ["executor"],
    ["testing"],
    ["engine"],
    ["llm", "server", "bench"],
    ["cli"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Imports against the direction, inside functions only, each with its reason.
LAZY_EXCEPTIONS = {
    ("executor", "testing"),  # toy:history-hash is a model by name
    ("engine", "testing"),  # preempt_probability is a fault on purpose
    ("testing", "sampling"),
    ("testing", "speculative"),
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> list[tuple[str, bool, int]]:
    """(module, at top level, line) of every kvern import of a file, type-checking blocks left out."""
    tree = ast.parse(path.read_text())
    found: list[tuple[str, bool, int]] = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((a.name, top, child.lineno) for a in child.names if a.name.startswith("kvern"))
            elif isinstance(child, ast.ImportFrom) and (child.module or "").startswith("kvern"):
                names = [child.module] if child.module != "kvern" else [f"kvern.{a.name}" for a in child.names]
                found.extend((name, top, child.lineno) for name in names if name)
            walk(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    walk(tree, True)
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert here in FLOOR_OF, f"{here} has no floor: give it one"
    for module, top, line in imports_of(path):
        there = room(module)
        if there in ("", "__version__", here):
            continue
        if not top and (here, there) in LAZY_EXCEPTIONS:
            continue
        below = FLOOR_OF[there] < FLOOR_OF[here]
        assert below, f"{path.name}:{line}: {here} imports {module}, which stands on the same floor or above"


FORBIDDEN = {
    # room: libraries none of its files may import, wherever the import stands
    "cache": {"torch", "time", "random", "asyncio", "socket", "threading", "datetime"},
    "scheduler": {"torch", "time", "random", "asyncio", "socket", "threading", "datetime"},
    "server": {"torch", "transformers"},
    "tokenizer": {"torch", "transformers"},
    "weights": {"torch", "transformers"},
    "layers": {"torch", "transformers"},
    "models": {"torch", "transformers"},
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_rooms_without_certain_libraries(name: str) -> None:
    for path in (PACKAGE / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for imported in names:
                library = imported.split(".")[0]
                assert library not in FORBIDDEN[name], f"{path}:{node.lineno} imports {library}"


def test_nothing_imports_transformers() -> None:
    """It costs seconds at start; only tests use it, as an oracle."""
    for path in FILES:
        assert "import transformers" not in path.read_text() and "from transformers" not in path.read_text(), path


@pytest.mark.parametrize(
    "module",
    [
        "kvern",
        "kvern.scheduler.scheduler",
        "kvern.testing",
        "kvern.engine.client",
        "kvern.server.routes",
        "kvern.cli.main",
    ],
)
def test_importing_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
