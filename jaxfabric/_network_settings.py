"""What the settings of the network between hosts, which config.py has, may be.

Each check raises a ValueError that begins with `source`, the setting and an equals sign.
"""

from __future__ import annotations

import ipaddress
import re

# As the core names them.
PATTERNS = (
    *("direct", "one-shot", "ring", "recursive-doubling", "halving-doubling"),
    *("bruck", "tree", "dissemination", "pairwise"),
)


def check_interface(source: str, text: object) -> None:
    """Wants names or subnets of interfaces."""
    for entry in str(text).split(","):
        try:
            if "/" in entry:
                ipaddress.ip_network(entry.strip(), strict=False)
        except ValueError as error:
            raise ValueError(
                f"{source}{text}: {error}; use names of interfaces, or subnets such as 10.0.0.0/8, "
                "separated by commas"
            ) from None


def check_port_range(source: str, text: object) -> None:
    """Wants a port, or a range of them."""
    first, dash, last = str(text).partition("-")
    ports = [int(port) for port in (first, last if dash else first) if port.isdecimal()]
    if text and not (len(ports) == 2 and 0 < ports[0] <= ports[1] < 1 << 16):
        raise ValueError(f"{source}{text}: use a range of ports such as 40000-40100")


def check_pattern(source: str, text: object) -> None:
    """Wants none, or names of patterns."""
    for name in filter(None, str(text).split(",") if text != "none" else ()):
        if name not in PATTERNS:
            raise ValueError(
                f"{source}{text}: {name!r} is no pattern; use none, or some of "
                f"{', '.join(PATTERNS)}, separated by commas"
            )


def check_network_cost(source: str, text: object) -> None:
    """Wants measured, default, or two figures."""
    if text in ("measured", "default"):
        return
    try:
        microseconds, gigabytes = map(float, str(text).split(","))
    except ValueError:
        microseconds = gigabytes = 0.0
    if not (0 < microseconds <= 1e6 and 0 < gigabytes <= 1e6):
        raise ValueError(
            f"{source}{text}: use measured, default, or the microseconds of a message and the GB/s "
            "of a long one, such as 30,1.2"
        )


def check_congestion_control(source: str, text: object) -> None:
    """Wants auto, system, or what may be a name: which there are the kernel knows."""
    if not re.fullmatch(r"[a-z0-9_-]{1,15}", str(text)):
        raise ValueError(
            f"{source}{text}: use auto, system, or a congestion control of the kernel, such as "
            "cubic (sysctl net.ipv4.tcp_available_congestion_control lists them)"
        )
