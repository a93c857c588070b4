"""Runs a job of two hosts inside a virtual machine, whose kernel has netem and a clock of its own.

    python in_vm.py SCRIPT

Started by test_vm.py as root of that machine. The network between the hosts loses 1 % of its
packets and has 20 ms of jitter; the clock of the machine jumps while the job runs.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import faults
import netns
import support

DAY = 86400


def main(script: str) -> None:
    end = pathlib.Path(script).with_name("end")
    with netns.Lab() as lab:
        hosts = [lab.host("hosta"), lab.host("hostb")]
        for host in hosts:
            netem = ("netem", "loss", "1%", "delay", "20ms", "10ms")
            host.run("tc", "qdisc", "add", "dev", "eth0", "root", *netem)
        lines = support.launchers(hosts, script, str(end), counts=(1, 1))
        jobs = [faults.start(line, deadline=60, unreachable_after=10) for line in lines]
        for job in jobs:
            job.wait_for('"looping"', timeout=120)
        for days in (1, -2, 1):
            time.clock_settime(time.CLOCK_REALTIME, time.time() + days * DAY)
            seen = jobs[0].output().count('"on"')
            jobs[0].wait_for('"on"', count=seen + 2, timeout=60)
        end.touch()
        results = [job.finish(100) for job in jobs]
        sent = hosts[0].run("tc", "-s", "qdisc", "show", "dev", "eth0").stdout
    print(json.dumps([vars(result) for result in results]))
    print(json.dumps(sent))


if __name__ == "__main__":
    main(*sys.argv[1:])
