"""The `jaxfabric` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

_RUN_HELP = """\
Starts N processes of one program on this host, or on each of several, as one job: lines of output
are prefixed with the number of the process, signals are passed on, and when one process fails the
others get a grace period to report, then are ended.

    jaxfabric run -n 4 train.py --steps 100
    jaxfabric run -n 2 --devices-per-process 4 -- python -m package.train
    JAXFABRIC_ENABLE=1 jaxfabric run -n 2 plain_jax.py
    jaxfabric run --nnodes 2 --node-rank R --coordinator host0:4800 -n 4 train.py   on both hosts

On several hosts -n may differ. Processes are numbered host by host; what happens to one ends, or
with --max-restarts starts again, the job on all.

A program joins the job by jaxfabric.initialize(), before it uses JAX. One that does not know of
jaxfabric needs JAXFABRIC_ENABLE=1 (or hlo); without it, its processes are N jobs of their own.
"""

_BENCH_HELP = """\
Times collectives between N processes of D CPU devices each, on the fabric and with XLA's own
collectives (Gloo between processes), in turns, and compares every result with numpy. It leaves
GPUs alone: those are timed by tests/gpu/run.sh.

    jaxfabric bench
    jaxfabric bench -n 4 --op psum,all_gather --bytes 8,64KiB,16MiB
    jaxfabric bench -n 1 -d 2 --rounds 5 --json
    jaxfabric bench simulate --help
"""


_TABLE_HELP = """\
Prints from how many bytes on a collective on GPUs is left to XLA (NCCL), by the number of ranks.
Bytes are those of the larger of one rank's operand and result. A number of ranks that is not there
is left to XLA. If any call of a program is, all of them are: jaxfabric.report() says so.

The limits are from published figures of others; the fabric has not run on a GPU yet.

    jaxfabric gpu-table
    JAXFABRIC_GPU_LIMITS='all_reduce/8=32M, all_to_all=0' jaxfabric gpu-table
    JAXFABRIC_GPU_LIMITS='*=0' jaxfabric gpu-table    XLA runs all
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough, as in `jaxfabric doctor | head`. Python flushes once more at
        # exit, and would complain.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 128 + signal.SIGPIPE
    return status


def _dispatch(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.subcommand == "run":
        return _run(parser, options)
    if options.subcommand == "doctor":
        from jaxfabric import doctor

        return doctor.main(as_json=options.json)
    if options.subcommand == "bench":
        return _simulate(options) if options.how == "simulate" else _bench(options)
    if options.subcommand == "gpu-table":
        return _gpu_table(as_json=options.json)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    from jaxfabric import __version__

    parser = argparse.ArgumentParser(
        prog="jaxfabric", description="Collectives for JAX on a fabric of their own."
    )
    parser.add_argument("--version", action="version", version=f"jaxfabric {__version__}")
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a program as several processes on this host",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "-n", "--num-processes", type=_positive, required=True, metavar="N", help="how many"
    )
    run.add_argument(
        "-d",
        "--devices-per-process",
        type=_positive,
        metavar="D",
        help="CPU devices of each process (JAX_NUM_CPU_DEVICES)",
    )
    run.add_argument(
        "--gpus-per-process",
        type=_positive,
        metavar="G",
        help="GPUs of each process (CUDA_VISIBLE_DEVICES): the first G for the first, and so on; "
        "without it each process sees, and takes memory of, all GPUs of its host",
    )
    _add_nodes(run.add_argument)
    run.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="K",
        help="start the whole job again after a failure, at most K times (default: 0)",
    )
    run.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long the others may go on after one has failed (default: 10)",
    )
    run.add_argument(
        "--json", action="store_true", help="print how each process ended, as JSON, last on stdout"
    )
    run.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="[--] script.py|program ...",
        help="a Python file, run by this Python, or any program, with its arguments",
    )
    doctor = commands.add_parser(
        "doctor", help="say what is installed, what works on this machine, and what does not"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    _add_bench(commands)
    table = commands.add_parser(
        "gpu-table",
        help="print up to which sizes collectives on GPUs run on the fabric",
        description=_TABLE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table.add_argument("--json", action="store_true", help="print JSON, with bytes as numbers")
    return parser


def _add_nodes(add: Callable[..., Any]) -> None:
    """The options of whatever is started on several hosts."""
    add("--nnodes", metavar="N", help="on how many hosts this command is run (default: 1)")
    add("--node-rank", metavar="R", help="which of them this host is, from 0")
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="an address of host 0, where the others find it; the port after it is used too",
    )
    add(
        "--join-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long the hosts wait for each other (default: 300)",
    )


def _add_bench(commands: Any) -> None:  # noqa: ANN401
    from jaxfabric import _simulate, bench

    parser = commands.add_parser(
        "bench",
        help="time collectives on this machine, beside XLA's own",
        description=_BENCH_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--op",
        type=bench.some_of(bench.BUS_FACTORS),
        default=tuple(bench.BUS_FACTORS),
        metavar="OP,...",
        help=f"some of {', '.join(bench.BUS_FACTORS)} (default: all)",
    )
    add(
        "--bytes",
        type=bench.sizes,
        default="8,1KiB,16KiB,256KiB,1MiB,16MiB",
        metavar="SIZE,...",
        help="the larger of a rank's input and output, rounded up to 4 bytes times the ranks "
        "(default: %(default)s)",
    )
    add(
        *("-n", "--num-processes"),
        type=_positive,
        default=2,
        metavar="N",
        help="processes on this host (default: 2)",
    )
    add(
        *("-d", "--devices-per-process"),
        type=_positive,
        default=1,
        metavar="D",
        help="CPU devices of each, every one of them a rank (default: 1)",
    )
    _add_nodes(add)
    add(
        "--against",
        type=lambda text: () if text == "none" else bench.some_of(bench.PEERS)(text),
        default=bench.PEERS[:1],
        metavar="NAME,...",
        help="what to compare with: none, or some of "
        f"{', '.join(bench.PEERS)} (default: {bench.PEERS[0]})",
    )
    add(
        "--rounds",
        type=_positive,
        default=3,
        metavar="R",
        help="turns of each implementation, of which the best counts (default: 3)",
    )
    add(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="longest time for one op at one size; 0: no limit (default: 300)",
    )
    add("--json", action="store_true", help="print one JSON document instead of the table")
    simulate = parser.add_subparsers(dest="how", metavar="simulate").add_parser(
        "simulate",
        help="predict times on many hosts instead",
        description=_simulate.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _simulate.add_arguments(simulate)


def _bench(options: argparse.Namespace) -> int:
    from jaxfabric import bench

    try:
        plan = bench.Plan(
            ops=options.op,
            sizes=options.bytes,
            processes=options.num_processes,
            devices=options.devices_per_process,
            nodes=_nodes(options),
            peers=options.against,
            rounds=options.rounds,
            timeout=options.timeout,
        )
        return bench.main(plan, as_json=options.json)
    except ValueError as error:
        print(f"jaxfabric: {error}", file=sys.stderr)
        return 2


def _simulate(options: argparse.Namespace) -> int:
    from jaxfabric import _simulate

    return _simulate.main(options)


def _gpu_table(*, as_json: bool) -> int:
    from jaxfabric import config, gpu_table

    try:
        settings = config.Config.from_environment()
    except config.ConfigError as error:
        print(f"jaxfabric: {error}", file=sys.stderr)
        return 2
    rows = [*gpu_table.rows(config.parse_gpu_limits("", settings.gpu_limits))]
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    config.warn_of_unknown_variables()
    print(f"{'ranks':>5}  {'op':<19}  {'types':<5}  {'XLA runs it from':>16}")
    for row in rows:
        limit = gpu_table.bytes_text(row.limit) if row.limit else "0"
        line = f"{row.ranks:>5}  {row.op:<19}  {row.kind:<5}  {limit:>16}"
        print(f"{line}  ({row.source})" if row.source else line)
    print(
        f"gpu_windows is {settings.gpu_windows}: on, peers address XLA's own arrays from "
        f"{gpu_table.bytes_text(gpu_table.WINDOWS_FROM)} on, where there are windows"
    )
    return 0


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from jaxfabric import launch

    command = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        parser.error("run: nothing to run: name a Python file or a program after the options")
    try:
        summary = launch.run(
            command,
            options.num_processes,
            nodes=_nodes(options),
            max_restarts=options.max_restarts,
            devices_per_process=options.devices_per_process,
            gpus_per_process=options.gpus_per_process,
            grace=options.grace,
        )
    except ValueError as error:
        print(f"jaxfabric: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"jaxfabric: cannot run {command[0]}: {error.strerror or error}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    except launch.JoinError as error:
        print(f"jaxfabric: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(dataclasses.asdict(summary)), flush=True)
    return summary.exit_code


def _nodes(options: argparse.Namespace) -> Any:  # noqa: ANN401
    """The options that say which host this is, or the variables of their names."""
    from jaxfabric import launch
    from jaxfabric.config import run_variable

    def given(option: str) -> tuple[str, str | None]:
        value = getattr(options, option.replace("-", "_"))
        return run_variable(option) if value is None else (f"--{option}", value)

    def whole(option: str) -> int | None:
        source, value = given(option)
        if value is not None and not value.strip().isdecimal():
            raise ValueError(f"{source} {value}: use a whole number")
        return None if value is None else int(value)

    count, rank, coordinator = whole("nnodes"), whole("node-rank"), given("coordinator")[1]
    if count is None and (rank is not None or coordinator is not None):
        raise ValueError("--node-rank and --coordinator are for several hosts: give --nnodes too")
    if (count or 1) > 1 and rank is None:
        raise ValueError(f"--nnodes {count} needs --node-rank, from 0 to {(count or 1) - 1}")
    return launch.Nodes(
        count=1 if count is None else count,
        rank=rank or 0,
        coordinator=coordinator,
        join_timeout=options.join_timeout,
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
