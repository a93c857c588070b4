"""The layers point downward, in C++ and in Python."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
import support

pytestmark = pytest.mark.timeout(120)

# A folder of xla_ffi/ may include itself and what stands behind it.
LOWER = {
    "base": (),
    "os": ("base",),
    "drivers": ("os", "base"),
    "memory": ("drivers", "os", "base"),
    "device": ("memory", "drivers", "os", "base"),
    "control": ("memory", "drivers", "os", "base"),
    "transport": ("memory", "drivers", "os", "base"),
    "collective": ("transport", "control", "device", "memory", "drivers", "os", "base"),
    "ffi": ("collective", "transport", "control", "device", "memory", "drivers", "os", "base"),
    # Beside ffi/, of which it knows nothing; for another version of XLA.
    "windows": ("collective", "memory", "drivers", "os", "base"),
    "python": (
        *("windows", "ffi", "collective", "transport", "control", "device"),
        *("memory", "drivers", "os", "base"),
    ),
}
# Whose host form is the emulated grid.
EMULATED = {"device/hardware.cuh", "device/multimem.cuh"}
SOURCES = sorted(
    path
    for path in (support.ROOT / "xla_ffi").rglob("*")
    if path.suffix in {".h", ".cc", ".cu", ".cuh", ".inc"}
)
PYTHON = sorted((support.ROOT / "jaxfabric").rglob("*.py"))
PACKAGE = support.ROOT / "jaxfabric"
PRIVATE_JAX_ALLOWED = {
    PACKAGE / "_primitive.py",
    PACKAGE / "_emit.py",
    *(PACKAGE / "_compat").glob("*.py"),
}


def name(path):
    return str(path.relative_to(support.ROOT))


def problems_in_source(relative: str, text: str) -> list[str]:
    """Includes of the file xla_ffi/`relative` that point upward or sideways."""
    folder, _, rest = relative.partition("/")
    problems = []
    for line in text.splitlines():
        if re.match(r'\s*#\s*include\s*[<"](xla|nanobind|Python\.h)', line):
            header = re.search(r'[<"](.*)[>"]', line)[1]
            if header.startswith("xla/") and folder not in {"ffi", "windows", "python"}:
                problems.append(f"{header}: only ffi/ sees XLA")
            if header.startswith(("nanobind", "Python.h")) and folder != "python":
                problems.append(f"{header}: only python/ sees Python")
        match = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if not match or "/" not in match[1] or match[1].startswith("xla/"):
            continue
        target, _, target_rest = match[1].partition("/")
        if target not in LOWER:
            problems.append(f"{match[1]}: no layer has that name")
        elif target != folder and target not in LOWER[folder]:
            problems.append(f"{match[1]}: {target}/ is not below {folder}/")
        elif "/fake/" in match[1] and "/fake/" not in relative and relative not in EMULATED:
            problems.append(f"{match[1]}: a fake is for tests")
        elif target == folder == "transport" and "/" in target_rest:
            ours, theirs = rest.split("/")[0], target_rest.split("/")[0]
            # faulty/ decorates any of them; the registry (a file of transport/ itself) knows all.
            if "/" in rest and ours not in {theirs, "faulty"}:
                problems.append(f"{match[1]}: transport/{ours} includes its sibling")
    return problems


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_cpp_includes_point_downward(path):
    relative = str(path.relative_to(support.ROOT / "xla_ffi"))
    assert relative.split("/")[0] in LOWER
    assert not problems_in_source(relative, path.read_text())


@pytest.mark.parametrize(
    ("relative", "include", "verdict"),
    [
        ("base/a.h", '#include "os/fd.h"', "not below"),
        ("transport/a.h", '#include "control/wire.h"', "not below"),
        ("transport/shm/a.cc", '#include "transport/tcp/b.h"', "sibling"),
        ("transport/shm/a.cc", '#include "transport/transport.h"', None),
        ("transport/shm/a.cc", '#include "transport/shm/b.h"', None),
        ("transport/faulty/a.cc", '#include "transport/shm/b.h"', None),
        ("transport/registry.cc", '#include "transport/shm/b.h"', None),
        ("collective/a.cc", '#include "xla/ffi/api/ffi.h"', "only ffi/"),
        ("ffi/a.cc", '#include "xla/ffi/api/ffi.h"', None),
        ("ffi/a.cc", "#include <nanobind/nanobind.h>", "only python/"),
        ("collective/a.cc", '#include "transport/transport.h"', None),
        ("os/a.cc", "#include <sys/mman.h>", None),
        ("os/a.cc", '#include "elsewhere/a.h"', "no layer"),
        ("drivers/cuda/a.cc", '#include "drivers/cuda/fake/grid.h"', "for tests"),
        ("device/all_reduce.cu", '#include "drivers/cuda/fake/grid.h"', "for tests"),
        ("device/hardware.cuh", '#include "drivers/cuda/fake/grid.h"', None),
        ("drivers/cuda/fake/a.cc", '#include "drivers/cuda/fake/grid.h"', None),
    ],
)
def test_the_check_itself(relative, include, verdict):
    problems = problems_in_source(relative, include)
    if verdict is None:
        assert not problems
    else:
        assert verdict in problems[0]


def imported_modules(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_private_jax_has_two_doors(path):
    private = {
        module
        for module in imported_modules(path.read_text())
        if re.match(r"(jax|jaxlib)(\.\w+)*\._\w+", module)
    }
    assert not private or path in PRIVATE_JAX_ALLOWED, sorted(private)


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_settings_are_read_in_one_place(path):
    if path.name == "config.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        # Text that merely mentions a variable is longer than its name.
        is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
        assert not (is_name and re.fullmatch(r"JAXFABRIC_[A-Z_]+", node.value)), node.lineno


def test_files_stay_short():
    files = [*SOURCES, *PYTHON, *(support.ROOT / "tests").rglob("*.py")]
    lengths = {name(path): path.read_text().count("\n") for path in files}
    assert not {path: n for path, n in lengths.items() if n > 400}


@pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"
)
def test_import_linter():
    beside = os.path.join(os.path.dirname(sys.executable), "lint-imports")
    command = beside if os.path.exists(beside) else shutil.which("lint-imports")
    result = subprocess.run(
        [command, "--no-cache"], cwd=support.ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
