"""A stand-in for the compiled core that records what the bootstrap does with it.

It connects nothing. `fail` makes it report a failure, as the real one does when a process has died.
"""

from __future__ import annotations

import sys
import types
from typing import ClassVar


class FakeError(RuntimeError):
    code = "UNAVAILABLE"


class FakeFabric:
    instances: ClassVar[list[FakeFabric]] = []

    def __init__(self, process_index, process_count, local_ranks, options, **more):
        self.process_index = process_index
        self.process_count = process_count
        self.local_ranks = local_ranks
        self.options = options
        self.more = more
        self.addresses = None
        self.text = None
        self.shutdowns = 0
        FakeFabric.instances.append(self)

    def address(self):
        return f"address of {self.process_index}".encode()

    def connect(self, addresses, secret=b"", incarnation=0):
        if self.text == "refuse":
            raise FakeError("refused")
        self.addresses = addresses
        self.secret = secret

    def gpu_problem(self):
        return ""

    def reads_problem(self):
        return ""

    def gpu_memory(self):
        return "memory of a fake"

    def shutdown(self):
        self.shutdowns += 1

    def failure(self):
        return self.text

    def left(self):
        return []

    def counters(self):
        return {"calls": 0}


def module(ffi=(0, 3)) -> types.ModuleType:
    """A module that can take the place of jaxfabric._ext."""
    fake = types.ModuleType("jaxfabric._ext")
    fake.Fabric = FakeFabric
    fake.FabricError = FakeError
    fake.registrations = lambda: {"jaxfabric_fake": {"execute": "capsule"}}
    fake.type_registrations = lambda: {"jaxfabric_type": {"type_id": "capsule"}}
    fake.ffi_version = lambda: ffi
    fake.cuda_status = lambda: "a fake has no kernels"
    fake.cuda_unreachable = lambda: ""
    fake.cuda_one_host = lambda: "GPU 0 offers no fabric handles"
    fake.cuda_build = lambda: {"images": {}, "architectures": "", "compiler": "", "reason": "fake"}
    fake.network = lambda net_interface: f"{net_interface or 'eth0'}, 10.0.0.1: fake"
    fake.begin_compilation = lambda: 0
    fake.end_compilation = lambda begun, fingerprint, devices: None
    return fake


def install() -> type[FakeFabric]:
    """Puts the fake in place for the rest of this process, and registers nothing with XLA."""
    fake = module()
    fake.registrations = dict
    fake.type_registrations = dict
    sys.modules["jaxfabric._ext"] = fake
    return FakeFabric
