"""What is installed is complete, and shows nothing that it need not show."""

import ast
import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import subprocess
import tarfile

import pytest
import support

import jaxfabric
from jaxfabric import _ext

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["_ext", "_windows"])
def module(request):
    """A compiled module of the package; the second is there for some versions of jaxlib only."""
    return pytest.importorskip(f"jaxfabric.{request.param}")


def binutils(module, program, *arguments):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    command = [program, *arguments, module.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def installed_files():
    try:
        distribution = importlib.metadata.distribution("jaxfabric")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxfabric is not installed by pip")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("the install is editable: it has no files of its own")
    return {str(path) for path in distribution.files}


def test_only_the_entry_point_is_exported(module):
    lines = binutils(module, "nm", "-D", "--defined-only").splitlines()
    assert [line.split()[-1] for line in lines] == ["PyInit_" + module.__name__.split(".")[1]]


def test_no_library_is_needed_that_a_plain_machine_lacks(module):
    lines = [line for line in binutils(module, "readelf", "-d").splitlines() if "(NEEDED)" in line]
    needed = {line.split("[")[1].split(".so")[0] for line in lines}
    assert needed <= {
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "libpthread",
        "libdl",
        "ld-linux-x86-64",
    }


def test_the_core_is_built_against_the_oldest_supported_headers():
    if (pathlib.Path(jaxfabric.__file__).parent.parent / "pyproject.toml").exists():
        pytest.skip("a source tree, built against whatever its developer has installed")
    assert _ext.ffi_version() == (0, 3)


def test_the_wheel_is_complete():
    installed = installed_files()
    sources = {
        str(path.relative_to(support.ROOT))
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in (support.ROOT / "jaxfabric").rglob(pattern)
    }
    assert {"jaxfabric/py.typed", "jaxfabric/_ext.pyi", "jaxfabric/_windows.pyi"} <= sources
    assert sources <= installed, sorted(sources - installed)
    package = {path for path in installed if path.startswith("jaxfabric/")}
    compiled = {path for path in package if path.endswith(".so")}
    names = sorted(path.split("/")[1].split(".")[0] for path in compiled)
    assert names in (["_ext"], ["_ext", "_windows"])
    bytecode = {path for path in package if path.endswith(".pyc")}
    assert package - compiled - bytecode == sources


def test_the_installed_package_is_the_one_under_test():
    installed_files()
    origin = importlib.metadata.distribution("jaxfabric").locate_file("jaxfabric/__init__.py")
    assert pathlib.Path(jaxfabric.__file__) == pathlib.Path(origin)


def test_metadata():
    installed_files()
    metadata = importlib.metadata.metadata("jaxfabric")
    assert metadata["Version"] == jaxfabric.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "# jaxfabric" in metadata.get_payload()
    scripts = importlib.metadata.entry_points(group="console_scripts", name="jaxfabric")
    assert [script.value for script in scripts] == ["jaxfabric.cli:main"]


def test_gpu_kernels_are_there_or_the_reason_why_not():
    build = _ext.cuda_build()
    if build["reason"]:
        assert build["reason"].startswith("built without nvcc: ")
        assert not build["images"]
        return
    sources = {path.stem for path in (support.ROOT / "xla_ffi/device").glob("*.cu")}
    assert build["images"].keys() == sources
    assert all(size > 1000 for size in build["images"].values())
    assert build["compiler"].startswith("nvcc ")
    assert "sm_" in build["architectures"]


def stub_names(body):
    """Names that a stub's module or class defines, private ones aside."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def public_names(value):
    return {name for name in vars(value) if not name.startswith("_")}


def test_the_stub_tells_what_a_module_has(module):
    path = support.ROOT / (module.__name__.replace(".", "/") + ".pyi")
    stub = ast.parse(path.read_text()).body
    assert stub_names(stub) == public_names(module)
    if module is not _ext:
        return
    (fabric,) = (node for node in stub if isinstance(node, ast.ClassDef) and node.name == "Fabric")
    assert stub_names(fabric.body) == public_names(_ext.Fabric)


@pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None,
    reason="scikit-build-core is not installed",
)
def test_the_source_distribution_has_what_a_build_needs(tmp_path, monkeypatch):
    from scikit_build_core.build import build_sdist

    monkeypatch.chdir(support.ROOT)
    name = build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        files = {path.partition("/")[2] for path in archive.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"} <= files
    needed = {
        str(path.relative_to(support.ROOT))
        for folder, suffixes in (
            ("xla_ffi", {".h", ".cc", ".map", ".cu", ".cuh"}),
            ("cmake", {".cmake", ".in", ".sh"}),
            ("jaxfabric", {".py", ".pyi"}),
        )
        for path in (support.ROOT / folder).rglob("*")
        if path.suffix in suffixes
    }
    assert needed <= files, sorted(needed - files)
    assert not {path for path in files if path.endswith(".so") or path.startswith("build/")}
