"""Hosts that are network namespaces of this machine, joined by switches that are bridges.

    with Lab() as lab:
        a, b = lab.host("hosta"), lab.host("hostb")
        subprocess.run(a.command("ping", "-c1", b.ipv4), check=True)

A host has its own network, host name, processes (its programs are children of its process 1),
System V objects and mounts: /proc, /sys, /etc/hosts with the names of all hosts, and, if asked for,
/dev/shm. So jaxfabric takes processes of two of them for processes of two machines. They share
everything else of the file system.

Nothing has a name outside: namespaces, links and processes go when the Lab is closed, and also when
this process is killed. Needs root, or a kernel that lets users make user namespaces.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "netns_process.py")
# Users often do not have the last two in their path.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_LAUNCHED = (sys.executable, "-I", "-S", _PROGRAM)


class _Holder:
    """A process that holds namespaces until this object, or this process, comes to its end."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*_LAUNCHED, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C at a terminal is not for it.
        )
        line = self._process.stdout.readline()
        if not line:
            reason = self._process.communicate()[1].strip().rpartition("\n")[2]
            raise OSError(f"no network namespaces here: {reason}")
        self.pid = int(line)

    def end(self) -> None:
        """Begins the end, which `close` waits for."""
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def close(self) -> None:
        self.end()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


class Host:
    """One of a Lab's hosts.

    Attributes:
        name: its host name, which the other hosts can resolve to `ipv4`.
        ipv4: its address in the first network.
        ipv6: the same.
        addresses: by network, the IPv4 and the IPv6 address.
    """

    def __init__(self, lab: Lab, name: str, number: int, networks: dict[str, int], shm: str):
        self.name = name
        self.addresses = {
            network: (f"10.77.{index}.{number}", f"fd77:{index}::{number}")
            for network, index in networks.items()
        }
        self.ipv4, self.ipv6 = next(iter(self.addresses.values()))
        self.lab = lab
        self._number = number
        self._networks = networks
        self.holder = _Holder("host", str(lab.switch.pid), name, shm)
        self.pid = self.holder.pid
        _batch(
            lab.switch.pid,
            *(
                f"link add {self._port(network)} type veth peer name {network} netns {self.pid}\n"
                f"link set {self._port(network)} master br{index} up"
                for network, index in networks.items()
            ),
        )
        _batch(
            self.pid,
            "link set lo up",
            *(
                f"link set {network} up\n"
                f"address add {v4}/24 dev {network}\n"
                f"address add {v6}/64 dev {network} nodad"
                for network, (v4, v6) in self.addresses.items()
            ),
        )

    def command(self, *argv: str) -> list[str]:
        """The command line that runs a program on this host, in the current directory.

        Its process passes signals on to the program (SIGKILL kills both) and ends as it does.
        """
        return [*_LAUNCHED, "enter", str(self.pid), *argv]

    def run(self, *argv: str, **options) -> subprocess.CompletedProcess:
        """Runs a program on this host to its end; its output as text, an error if it fails."""
        defaults = {"check": True, "text": True, "capture_output": True}
        return subprocess.run(self.command(*argv), **(defaults | options))

    def link(self, *, up: bool, network: str | None = None) -> None:
        """Pulls the cable of a network (the first), or plugs it in: nobody is told."""
        port = self._port(network or self.first_network)
        _batch(self.lab.switch.pid, f"link set {port} {'up' if up else 'down'}")

    @property
    def first_network(self) -> str:
        """The name of its first network, and of its interface to that."""
        return next(iter(self._networks))

    def unplug(self) -> str:
        """Takes its first network's cable out of the switch, and returns the name of its end."""
        port = self._port(self.first_network)
        _batch(self.lab.switch.pid, f"link set {port} nomaster")
        return port

    def plug_in(self) -> None:
        """Ends `unplug`."""
        bridge = f"br{self._networks[self.first_network]}"
        _batch(self.lab.switch.pid, f"link set {self._port(self.first_network)} master {bridge}")

    def shape(
        self, mbit: float | None, *, queue_ms: float = 50, network: str | None = None
    ) -> None:
        """Limits a network (the first) in both directions; None ends that.

        Args:
            mbit: the rate, in 10^6 bits per second.
            queue_ms: a packet that would wait longer for its turn is dropped.
            network: which.
        """
        network = network or self.first_network
        for pid, device in ((self.pid, network), (self.lab.switch.pid, self._port(network))):
            if mbit is None:
                arguments = ["del", "dev", device, "root"]
            else:
                # A timer tick of 4 ms at full rate, and at least one large packet.
                burst = max(64 << 10, int(mbit * 1e6 / 8 / 250))
                arguments = [
                    "replace",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    f"{mbit * 1000:.0f}kbit",
                ]
                arguments += ["burst", f"{burst}b", "latency", f"{queue_ms:g}ms"]
            subprocess.run(
                [*_LAUNCHED, "net", str(pid), _tool("tc"), "qdisc", *arguments],
                check=True,
                capture_output=True,
                text=True,
            )

    def close(self) -> None:
        """Kills all of the host's processes. Idempotent.

        Their ends are told to the others, as far as links are up.
        """
        self.holder.close()

    def _port(self, network: str) -> str:
        return f"h{self._number}n{self._networks[network]}"


class Lab:
    """Hosts and the switches between them. A context manager.

    Args:
        networks: a switch for each; names of the interfaces that hosts have to them.
    """

    def __init__(self, networks: tuple[str, ...] = ("eth0",)) -> None:
        self._networks = {name: index for index, name in enumerate(networks, 1)}
        self.hosts: list[Host] = []
        try:
            self.switch = _Holder("switch")
            _batch(
                self.switch.pid,
                *(
                    f"link add br{index} type bridge\nlink set br{index} up"
                    for index in self._networks.values()
                ),
            )
        except BaseException:
            self.close()
            raise

    def host(self, name: str, networks: tuple[str, ...] | None = None, shm: str = "shared") -> Host:
        """Adds a host.

        Args:
            name: its host name.
            networks: those it is plugged into; default: all.
            shm: its /dev/shm: "shared" with this machine, a size such as "64m", or "absent".
        """
        chosen = {n: self._networks[n] for n in networks or self._networks}
        host = Host(self, name, len(self.hosts) + 1, chosen, shm)
        self.hosts.append(host)
        names = ["127.0.0.1 localhost", "::1 localhost"]
        for each in self.hosts:
            names += [f"{each.ipv4} {each.name}", f"{each.ipv6} {each.name}"]
        for each in self.hosts:
            with open(f"/proc/{each.pid}/root/etc/hosts", "w") as file:
                file.write("\n".join(names) + "\n")
        return host

    def switch_program(self, *argv: str) -> subprocess.Popen[str]:
        """Starts a program, with pipes for its input and output, in the network of the switches."""
        return subprocess.Popen(
            [*_LAUNCHED, "net", str(self.switch.pid), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """Ends all hosts and networks. Idempotent."""
        holders = [host.holder for host in self.hosts]
        if hasattr(self, "switch"):
            holders.append(self.switch)
        for holder in holders:  # All at once: the kernel takes its time.
            holder.end()
        for holder in holders:
            holder.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def unavailable() -> str:
    """Why there can be no Lab here, or an empty string."""
    try:
        with Lab() as lab:
            lab.host("probe", shm="1m").shape(100)
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


def _tool(name: str) -> str:
    """The path of a program of iproute2."""
    path = shutil.which(name, path=_PATH)
    if path is None:
        raise OSError(f"no network namespaces here: there is no {name} (apt-get install iproute2)")
    return path


def _batch(pid: int, *commands: str) -> None:
    """Runs commands of ip in a network namespace."""
    subprocess.run(
        [*_LAUNCHED, "net", str(pid), _tool("ip"), "-batch", "-"],
        input="\n".join(commands) + "\n",
        check=True,
        capture_output=True,
        text=True,
    )
