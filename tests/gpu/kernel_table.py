"""What each GPU kernel of a build takes: registers, shared memory, stack and spills.

    python tests/gpu/kernel_table.py build/dev

Reads what ptxas said while the kernels were built, which lies in kernels/ of the build folder.
Exit code 1: a kernel spills registers, or uses more stack than the bound, or is in the sources but
not in the build. 77: the build has no kernels, and the reason is printed. Needs Python and a C++
preprocessor ($CXX or c++).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "xla_ffi" / "device"
# A few scalars whose address is taken; an array that is indexed at run time is more than that.
STACK_BOUND = 64
SKIPPED = 77


@dataclasses.dataclass
class Kernel:
    """A kernel, or a function of kernels; sizes in bytes, without dynamic shared memory."""

    name: str
    architecture: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


def parse(log: str, architecture: str) -> list[Kernel]:
    """What `ptxas -v` says; a function that was not inlined has no registers of its own."""
    kernels = []
    for line in log.splitlines():
        if name := re.search(r"Function properties for (\S+)", line):
            kernels.append(Kernel(name[1], architecture))
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            kernel = kernels[-1]
            kernel.stack, kernel.spill_stores, kernel.spill_loads = map(int, frame.groups())
        elif used := re.search(r"Used (\d+) registers", line):
            kernels[-1].registers = int(used[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                kernels[-1].shared = int(shared[1])
            if stack := re.search(r"(\d+) bytes cumulative stack size", line):
                kernels[-1].stack = int(stack[1])
    return kernels


def in_sources(folder: pathlib.Path) -> set[str]:
    """Names of the kernels that the .cu files define, macros expanded."""
    names = set()
    bounds = r"(?:__launch_bounds__\s*\([^)]*\)\s+)?"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    arguments = ["-std=c++20", "-E", "-P", "-D__CUDACC__", f"-I{folder.parent}"]
    for path in sorted(folder.glob("*.cu")):
        command = [*compiler, *arguments, "-xc++", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names |= set(re.findall(rf"\b__global__\s+{bounds}void\s+{bounds}(\w+)\s*\(", text))
    return names


def problems(
    kernels: list[Kernel], sources: set[str], architectures: list[str], stack_bound: int
) -> list[str]:
    """One line for each kernel that is missing, or takes what it must not."""
    lines = []
    for kernel in kernels:
        where = f"{kernel.name} for {kernel.architecture}"
        if kernel.spill_stores or kernel.spill_loads:
            lines.append(
                f"{where} spills registers: {kernel.spill_stores} bytes stored, "
                f"{kernel.spill_loads} loaded; __launch_bounds__(threads, 1) lets it have more, "
                "else it must hold fewer values at a time"
            )
        if kernel.stack > stack_bound:
            lines.append(
                f"{where} uses {kernel.stack} bytes of stack, more than {stack_bound}: an array "
                "that is indexed at run time, or a loop over one that was not unrolled"
            )
    built = {(kernel.name, kernel.architecture) for kernel in kernels}
    lines += [
        f"{name} is in the sources, but not in the build for {architecture}: build again"
        for name in sorted(sources)
        for architecture in architectures
        if (name, architecture) not in built
    ]
    return lines


def table(kernels: list[Kernel], architectures: list[str]) -> str:
    """One row per kernel: registers by architecture, and the most of the rest in any of them."""
    header = ["kernel", *architectures, "shared", "stack", "spills"]
    rows = []
    for name in sorted({kernel.name for kernel in kernels}):
        same = {kernel.architecture: kernel for kernel in kernels if kernel.name == name}
        registers = [str(same[a].registers) if a in same else "-" for a in architectures]
        rest = [
            max(kernel.shared for kernel in same.values()),
            max(kernel.stack for kernel in same.values()),
            max(kernel.spill_stores + kernel.spill_loads for kernel in same.values()),
        ]
        rows.append([name, *registers, *map(str, rest)])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in [header, *rows]
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=pathlib.Path, help="a build folder, such as build/dev")
    parser.add_argument("--json", action="store_true", help="all figures, as JSON")
    parser.add_argument(
        "--stack", type=int, default=STACK_BOUND, help="bytes allowed; default %(default)s"
    )
    options = parser.parse_args(arguments)
    try:
        build = json.loads((options.build / "kernels" / "build.json").read_text())
    except FileNotFoundError as error:
        parser.error(f"{options.build} is not a build folder of jaxfabric: {error}")
    if build["reason"]:
        print(f"SKIPPED: {build['reason']}")
        return SKIPPED
    if not build["sources"]:
        print(f"SKIPPED: there are no kernels in {SOURCES}")
        return SKIPPED
    architectures = [a for a in build["architectures"].split() if a.startswith("sm_")]
    kernels = []
    for source in build["sources"].split():
        for architecture in architectures:
            log = options.build / "kernels" / f"{source}.{architecture}.cubin.log"
            if log.exists():
                kernels += parse(log.read_text(), architecture)
    found = problems(kernels, in_sources(SOURCES), architectures, options.stack)
    if options.json:
        rows = [dataclasses.asdict(kernel) for kernel in kernels]
        print(json.dumps({**build, "kernels": rows, "problems": found}, indent=2))
    else:
        print(f"{build['compiler']}: registers a thread, the rest in bytes")
        print(table(kernels, architectures))
        for line in found:
            print(f"FAILED: {line}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
