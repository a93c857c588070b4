"""tests/gpu/kernel_table.py reads ptxas right, and fails where it should."""

import json

import pytest
from gpu import kernel_table
from gpu.kernel_table import Kernel

# What ptxas 13.0 said.
LOG_80 = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'calling' for 'sm_80'
ptxas info    : Function properties for calling
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compile time = 8.414 ms
ptxas info    : Function properties for called
    32 bytes stack frame, 28 bytes spill stores, 28 bytes spill loads
ptxas info    : Compiling entry function 'spilling' for 'sm_80'
ptxas info    : Function properties for spilling
    736 bytes stack frame, 476 bytes spill stores, 708 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 736 bytes cumulative stack size, 512 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 66.133 ms
"""  # noqa: E501
LOG_100 = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'good' for 'sm_100'
ptxas info    : Function properties for good
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 17 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
"""


def test_parse():
    assert kernel_table.parse(LOG_80, "sm_80") == [
        Kernel("calling", "sm_80", registers=24),
        Kernel("called", "sm_80", stack=32, spill_stores=28, spill_loads=28),
        Kernel("spilling", "sm_80", 32, shared=512, stack=736, spill_stores=476, spill_loads=708),
    ]
    assert kernel_table.parse(LOG_100, "sm_100") == [Kernel("good", "sm_100", 17, 1024, 16)]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build folder with the kernel `good`, and sources that have it."""
    sources = tmp_path / "device"
    sources.mkdir()
    monkeypatch.setattr(kernel_table, "SOURCES", sources)
    (sources / "one.cu").write_text('extern "C" __global__ void good(Arguments arguments) {}\n')
    logs = tmp_path / "kernels"
    logs.mkdir()
    (logs / "one.sm_100.cubin.log").write_text(LOG_100)
    write_build(tmp_path)
    return tmp_path


def write_build(folder, **changes):
    text = {
        "reason": "",
        "compiler": "nvcc 13.0.88",
        "architectures": "sm_100 compute_100",
        "sources": "one",
    }
    (folder / "kernels" / "build.json").write_text(json.dumps({**text, **changes}))


def test_table(build, capsys):
    assert kernel_table.main([str(build)]) == 0
    header, row = capsys.readouterr().out.splitlines()[1:]
    assert header.split() == ["kernel", "sm_100", "shared", "stack", "spills"]
    assert row.split() == ["good", "17", "1024", "16", "0"]
    assert kernel_table.main(["--json", str(build)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"][0]["registers"] == 17
    assert report["problems"] == []


def test_spills_and_stack_fail(build, capsys):
    write_build(build, architectures="sm_80")
    (build / "kernels" / "one.sm_80.cubin.log").write_text(LOG_80)
    assert kernel_table.main([str(build)]) == 1
    output = capsys.readouterr().out
    assert "FAILED: spilling for sm_80 spills registers: 476 bytes stored, 708 loaded" in output
    assert "FAILED: spilling for sm_80 uses 736 bytes of stack, more than 64" in output
    assert "FAILED: called for sm_80 spills" in output
    assert "called for sm_80 uses" not in output


def test_stack_bound_is_settable(build, capsys):
    assert kernel_table.main(["--stack", "8", str(build)]) == 1
    assert "good for sm_100 uses 16 bytes of stack, more than 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    [
        "#define KERNEL(name) __global__ void __launch_bounds__(8) name##er(A a)\nKERNEL(oth) {}",
        "__global__ void __launch_bounds__(512) other(Arguments a) {}",
        "__global__ __launch_bounds__(512, 1) void other(Arguments a) {}",
    ],
)
def test_missing_kernel_fails(build, capsys, source):
    (build / "device" / "two.cu").write_text(f"// __global__ void commented(A a)\n{source}\n")
    assert kernel_table.main([str(build)]) == 1
    output = capsys.readouterr().out
    assert "FAILED: other is in the sources, but not in the build for sm_100" in output
    assert "commented" not in output


def test_build_without_nvcc_is_skipped(build, capsys):
    write_build(build, reason="built without nvcc: none here")
    assert kernel_table.main([str(build)]) == kernel_table.SKIPPED
    assert capsys.readouterr().out == "SKIPPED: built without nvcc: none here\n"


def test_folder_without_a_build(tmp_path, capsys):
    with pytest.raises(SystemExit):
        kernel_table.main([str(tmp_path)])
    assert "is not a build folder" in capsys.readouterr().err
