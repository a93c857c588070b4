"""What runs in the namespaces of netns.py: a program of its own, started by its path.

    switch             holds a network namespace (for an ordinary user in a new user namespace)
    host SWITCH NAME SHM
                       holds the namespaces of a host, as its process 1
    net PID ARGV...    becomes a program in the network namespace of PID
    enter PID ARGV...  runs a program on the host whose process 1 is PID; passes signals on, and
                       ends as it does

The first two print the pid that the others take, and end with everything in their namespaces at the
end of their standard input: so whoever started them leaves nothing, not even when it is killed.
"""

import ctypes
import os
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
_HOST = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
_BIND, _PRIVATE_BELOW = 0x1000, 0x4000 | 0x40000
_PR_SET_PDEATHSIG = 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what, *arguments):
    if getattr(_libc, what)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}{arguments}: {os.strerror(number)}")


def _mount(source, target, kind=None, flags=0, data=None):
    texts = [None if x is None else x.encode() for x in (source, target, kind)]
    _call("mount", *texts, flags, None if data is None else data.encode())


def _join(pid, flags):
    """Enters namespaces of a process, and its user namespace if that is another one."""
    if not os.path.exists(f"/proc/{pid}/ns"):
        sys.exit(f"process {pid}, which held the namespaces, has ended")
    if os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user"):
        flags |= NEWUSER
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY)
    if flags:
        _call("setns", os.pidfd_open(pid), flags)
    if flags & NEWNS:  # In a changed root, that of the namespace is another one.
        os.fchdir(root)
        os.chroot(".")
    os.close(root)


def _switch():
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", NEWNET)
    except PermissionError:
        _call("unshare", NEWUSER | NEWNET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    print(os.getpid(), flush=True)
    sys.stdin.read()


def _host(switch, name, shm):
    _join(int(switch), 0)
    _call("unshare", _HOST)
    ready, say_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        _die_with_parent()
        os.setsid()
        _furnish(name, shm)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Orphans of the host are reaped.
        os.write(say_ready, b"x")
        os.close(say_ready)
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        while True:
            signal.pause()
    os.close(say_ready)
    if os.read(ready, 1):
        print(child, flush=True)
        sys.stdin.read()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _furnish(name, shm):
    _call("sethostname", name.encode(), len(name.encode()))
    _mount(None, "/", flags=_PRIVATE_BELOW)
    _mount("proc", "/proc", "proc")
    # A file of its own, without a place to be left in.
    _mount("tmpfs", "/sys", "tmpfs", data="size=64k")
    open("/sys/hosts", "w").close()
    _mount("/sys/hosts", "/etc/hosts", flags=_BIND)
    _call("umount", b"/sys")
    _mount("sysfs", "/sys", "sysfs")
    if shm == "absent":
        descriptors = {device: os.open(f"/dev/{device}", os.O_PATH) for device in _DEVICES}
        _mount("tmpfs", "/dev", "tmpfs", data="size=64k")
        for device, descriptor in descriptors.items():
            open(f"/dev/{device}", "w").close()
            _mount(f"/proc/self/fd/{descriptor}", f"/dev/{device}", flags=_BIND)
        os.symlink("/proc/self/fd", "/dev/fd")
    elif shm != "shared":
        _mount("tmpfs", "/dev/shm", "tmpfs", data=f"size={shm}")


def _net(pid, *argv):
    _join(int(pid), NEWNET)
    os.execvp(argv[0], argv)


def _enter(pid, *argv):
    folder = os.getcwd()
    _join(int(pid), _HOST)
    passed_on = {
        number
        for number in signal.valid_signals()
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
        and number < signal.SIGRTMIN
    }
    # Until there is someone to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        _die_with_parent()
        os.setsid()  # A signal to the group of this process arrives once, not twice.
        os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        os.execvp(argv[0], argv)
    for number in passed_on:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _die_with_parent():
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    {"switch": _switch, "host": _host, "net": _net, "enter": _enter}[sys.argv[1]](*sys.argv[2:])
