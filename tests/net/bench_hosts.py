"""`jaxfabric bench` on several hosts that are network namespaces of this machine.

    python tests/net/bench_hosts.py --hosts 2 -- -n 1 --bytes 8,1MiB --against xla,mpi4jax

What comes after -- goes to `jaxfabric bench` on each host. With --mbit the links are that slow;
without, they are as fast as the kernel copies.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
import threading

_TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_TESTS))
import netns  # noqa: E402

_PORT = 4800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument("--mbit", type=float, metavar="MBIT/S", help="what each link carries")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="of `jaxfabric bench`")
    options = parser.parse_args()
    with netns.Lab() as lab, tempfile.TemporaryDirectory() as folder:
        hosts = [lab.host(f"host{number}") for number in range(options.hosts)]
        if options.mbit:
            for host in hosts:
                host.shape(options.mbit)
        environment = os.environ | _RemoteShell(hosts, pathlib.Path(folder)).environment
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        running = [
            subprocess.Popen(
                host.command(
                    *(
                        sys.executable,
                        "-P",
                        "-m",
                        "jaxfabric",
                        "bench",
                        "--nnodes",
                        str(len(hosts)),
                    ),
                    *("--node-rank", str(rank), "--coordinator", f"{hosts[0].ipv4}:{_PORT}"),
                    *options.options,
                ),
                env=environment,
            )
            for rank, host in enumerate(hosts)
        ]
        return max(process.wait() for process in running)


class _RemoteShell:
    """Starts programs on hosts for an mpirun: on one host it cannot reach processes of another.

    It runs this file again, with what it would give to ssh, and that asks here.
    """

    def __init__(self, hosts: list[netns.Host], folder: pathlib.Path) -> None:
        self.hosts = {name: host for host in hosts for name in (host.name, host.ipv4)}
        path = folder / "shell"
        file = folder / "hosts"
        file.write_text("".join(f"{host.name} slots=64\n" for host in hosts))
        self.environment = {
            "PRTE_MCA_prte_default_hostfile": str(file),
            "PRTE_MCA_plm_ssh_agent": shlex.join([sys.executable, __file__, "--ask", str(path)]),
            "PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe",
        }
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as file:
            host, *command = json.loads(file.readline())
            line = self.hosts[host].command("sh", "-c", " ".join(command))
            print(subprocess.run(line, stdin=subprocess.DEVNULL, check=False).returncode, file=file)


def _ask(path: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as file:
            print(json.dumps(arguments), file=file, flush=True)
            return int(file.readline() or 1)


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--ask"] else main())
