import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import support

from jaxfabric import _ext, cli, config, launch
from jaxfabric.bootstrap import service
from jaxfabric.launch import job

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _no_coordination_service(monkeypatch):
    """Jobs run inside this process get none: its threads would outlive the test."""
    monkeypatch.setattr(service.CoordinationService, "start", lambda self, _: None)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def run(code: str, n: int = 2, **options):
    out, err = io.BytesIO(), io.BytesIO()
    before = support.open_descriptors()
    summary = launch.run(python(code), n, stdout=out, stderr=err, **options)
    assert support.open_descriptors() == before
    return summary, out.getvalue().decode(), err.getvalue().decode()


START = "import os, sys, time, signal; process = int(os.environ['JAXFABRIC_PROCESS_ID']); "


def test_success_and_prefixes():
    summary, out, err = run(START + "print('hello'); print('from', process, file=sys.stderr)")
    assert summary.exit_code == 0
    assert summary.first_failure is None
    assert sorted(out.splitlines()) == ["[0] hello", "[1] hello"]
    assert sorted(err.splitlines()) == ["[0] from 0", "[1] from 1"]


def test_environment_of_the_processes():
    code = "import os; print(sorted(k for k in os.environ if k.startswith(('JAXFABRIC', 'JAX_N'))))"
    _, out, _ = run(code, n=2, devices_per_process=3)
    assert out.count("JAX_NUM_CPU_DEVICES") == 2
    for name in config.LAUNCHER_VARIABLES:
        assert out.count(name) == 2
    _, out, _ = run("import os; print(os.environ.get('JAXFABRIC_COORDINATOR'))", n=1)
    assert out == "[0] None\n"


@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, ["0,1", "2,3"]), ("7,GPU-a,5,4", ["7,GPU-a", "5,4"]), ("1,2,3", None)],
)
def test_processes_take_their_gpus(monkeypatch, visible, shown):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code = (
        START
        + "print(os.environ['JAXFABRIC_LOCAL_PROCESS_ID'], os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    if shown is None:
        with pytest.raises(ValueError, match="2 processes need 4 GPUs, and CUDA_VISIBLE_DEVICES=1"):
            run(code, gpus_per_process=2)
        return
    _, out, _ = run(code, gpus_per_process=2)
    assert sorted(out.splitlines()) == [f"[{i}] {i} {each}" for i, each in enumerate(shown)]


def test_python_files_are_run_by_this_python(tmp_path):
    script = support.write_script(tmp_path, "import sys; print(sys.executable, *sys.argv[1:])")
    out = io.BytesIO()
    launch.run([str(script), "-n", "7"], 1, stdout=out, stderr=out)
    assert out.getvalue().decode() == f"[0] {sys.executable} -n 7\n"


def test_exit_code_of_the_first_failure_and_its_last_lines():
    code = START + (
        "print('before', process, flush=True)\n"
        "if process == 1: print('the reason', file=sys.stderr); sys.exit(7)\n"
        "signal.sigwait([signal.SIGTERM])\n"
    )
    code = code.replace(
        "process = int", "signal.pthread_sigmask(0, [signal.SIGTERM]); process = int"
    )
    summary, _, err = run(code, n=3, grace=0.2)
    assert summary.exit_code == 7
    assert summary.first_failure == 1
    assert "process 1 failed first: it exited with status 7" in err
    assert err.index("failed first") < err.rindex("    the reason")
    assert [r.ended_by_launcher for r in summary.processes] == [True, False, True]
    assert summary.processes[1].last_lines == ("before 1", "the reason")


def test_a_killed_process_gives_128_plus_signal():
    code = (
        START
        + "process == 1 and os.kill(os.getpid(), signal.SIGKILL); process == 0 and sys.exit(0)"
    )
    summary, _, err = run(code)
    assert summary.exit_code == 128 + signal.SIGKILL
    assert summary.processes[1].signal == "SIGKILL"
    assert "process 1" in err
    assert "was killed by SIGKILL" in err


def test_grace_lets_the_others_report(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = START + (
        f"\npipe = open({str(tmp_path / 'pipe')!r}, 'rw'[process == 0])\n"
        "if process == 0: pipe.write(str(os.getpid())); sys.exit(3)\n"
        "import select; other = os.pidfd_open(int(pipe.read())); select.select([other], [], [])\n"
        "print('noticed it', file=sys.stderr); sys.exit(1)\n"
    )
    summary, _, err = run(code, grace=20)
    assert summary.exit_code == 3
    assert summary.seconds < 10
    assert "[1] noticed it" in err
    assert not summary.processes[1].ended_by_launcher


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(job, "TERM_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    code = START + (
        "\nif process == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pipe = open({str(tmp_path / 'pipe')!r}, 'rw'[process == 0])\n"
        "if process == 1: sys.exit(2)\n"
        "while True: signal.pause()\n"
    )
    summary, _, err = run(code, grace=0.2)
    assert summary.exit_code == 2
    assert summary.processes[0].exit_code == 137
    assert "ending process(es) 0 with SIGTERM" in err
    assert "ending process(es) 0 with SIGKILL" in err


def test_what_a_process_leaves_behind_is_ended():
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', "
        "'import signal; signal.pause()']); print(p.pid)"
    )
    summary, out, _ = run(code, n=1)
    assert summary.exit_code == 0
    assert summary.seconds < 10
    pid = int(out.split()[1])
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    assert select.select([handle], [], [], 10)[0], "the process's own child lives on"
    os.close(handle)


def test_output_is_cut_into_lines_whatever_its_chunks():
    summary, out, _ = run(
        "import os\n"
        "for part in (b'a', b'b\\nc\\n\\n', b'x' * 200000 + b'\\n', b'\\xc3\\xa9 no end'):\n"
        "  while part: part = part[os.write(1, part):]\n",
        n=1,
    )
    assert summary.exit_code == 0
    lines = out.splitlines()
    assert lines[:3] == ["[0] ab", "[0] c", "[0] "]
    assert lines[-1] == "[0] \u00e9 no end"
    assert sum(line.count("x") for line in lines) == 200000
    assert all(line.startswith("[0] ") for line in lines)
    assert summary.processes[0].last_lines[:3] == ("ab", "c", "")


def test_program_that_does_not_exist(capsys):
    assert cli.main(["run", "-n", "2", "--", "/no/such/program"]) == 127
    assert "cannot run /no/such/program" in capsys.readouterr().err


def test_bad_setting_is_named_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setenv("JAXFABRIC_HEARTBEAT", "never")
    assert cli.main(["run", "-n", "2", "--", "true"]) == 2
    assert "JAXFABRIC_HEARTBEAT=never" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "-n", "0", "x"], ["run", "-n", "2"], ["run", "x"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["doctor", "--help"]])
def test_help_everywhere(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "jaxfabric" in capsys.readouterr().out


def test_json_summary():
    job = support.Job(support.launcher(1, "sh", "-c", "echo hi; exit 4", options=("--json",)))
    result = job.finish(30)
    assert result.returncode == 4
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["exit_code"] == 4
    assert summary["processes"][0]["last_lines"] == ["hi"]


WAITING = """
    import os, signal, sys
    def handler(number, frame):
        print("got", signal.Signals(number).name, flush=True)
        sys.exit(0 if number == signal.SIGINT else 5)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    signal.signal(signal.SIGUSR1, lambda *_: print("poked", flush=True))
    print("ready", flush=True)
    while True:
        signal.pause()
"""


def test_signals_are_passed_on(tmp_path):
    script = support.write_script(tmp_path, WAITING)
    job = support.Job(support.launcher(2, str(script)))
    job.wait_for("ready", count=2)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("poked", count=2)
    job.process.send_signal(signal.SIGINT)
    result = job.finish(30)
    assert result.returncode == 0, result.explain()
    assert result.stdout.count("got SIGINT") == 2
    assert not result.leftovers


def test_sigterm_gives_the_status_of_the_process(tmp_path):
    script = support.write_script(tmp_path, WAITING)
    job = support.Job(support.launcher(1, str(script)))
    job.wait_for("ready")
    job.process.terminate()
    result = job.finish(30)
    assert result.returncode == 5, result.explain()
    assert "got SIGTERM" in result.stdout


def test_second_interrupt_kills(tmp_path):
    script = support.write_script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
        print("ready", flush=True)
        while True:
            signal.pause()
        """,
    )
    job = support.Job(support.launcher(1, str(script)))
    job.wait_for("ready")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("no")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(30).returncode == 137


def test_processes_die_with_a_killed_launcher(tmp_path):
    script = support.write_script(tmp_path, WAITING)
    job = support.Job(support.launcher(2, str(script)))
    job.wait_for("ready", count=2)
    job.process.kill()
    job.process.wait()
    assert not job.wait_until_empty()
    assert not job.finish(30).leftovers


def test_reader_of_the_output_goes_away(tmp_path):
    script = support.write_script(tmp_path, "while True: print('x' * 1000, flush=True)")
    job = support.Job(["sh", "-c", '"$@" | head -n 1', "sh", *support.launcher(2, str(script))])
    result = job.finish(30)
    assert result.stdout.count("\n") == 1
    assert not job.wait_until_empty()


def test_idle_launcher_uses_no_cpu(tmp_path):
    script = support.write_script(tmp_path, WAITING)
    job = support.Job(support.launcher(1, str(script)))
    job.wait_for("ready")
    stat = f"/proc/{job.process.pid}/task/{job.process.pid}/status"

    def switches() -> int:
        with open(stat) as status:
            return sum(int(x.split()[1]) for x in status if "ctxt_switches" in x)

    # A launcher that polled would wake up again and again: it may settle, then must sleep.
    deadline = time.monotonic() + 10
    before = -1
    while before != switches() and time.monotonic() < deadline:
        before = switches()
        with pytest.raises(Exception, match="timed out"):
            job.process.wait(0.3)
    assert before == switches()
    job.process.terminate()
    job.finish(30)


def test_doctor_reports_versions_and_machine(capsys, monkeypatch):
    monkeypatch.setenv("JAXFABRIC_ENABLE", "1")
    cli.main(["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    for name in ("python", "jax", "jaxlib", "cores", "process_vm_readv", "deadline"):
        assert findings[name]["value"]
    assert findings["switch"]["value"].startswith("lax ")
    cli.main(["doctor"])
    assert "machine:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_output_that_nobody_reads_is_no_error(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxfabric", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert not stderr


@pytest.mark.parametrize(
    ("images", "reason", "shown"),
    [
        ({"a": 3 << 20, "b": 1 << 19}, "", "sm_90 compute_90, 3.5 MiB, nvcc 13.0.88"),
        ({}, "no nvcc", "none: no nvcc (with kernels: JAXFABRIC_CUDA=1 pip install .)"),
    ],
)
def test_doctor_reports_the_gpu_kernels(capsys, monkeypatch, images, reason, shown):
    build = {"architectures": "sm_90 compute_90", "compiler": "nvcc 13.0.88"}
    monkeypatch.setattr(_ext, "cuda_build", lambda: {"images": images, "reason": reason, **build})
    cli.main(["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["GPU kernels"]["value"] == shown
    assert findings["GPU kernels"]["problem"] is None


def test_doctor_finds_the_transports_usable(capsys):
    cli.main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    transports = {f["name"]: f for f in findings if f["section"] == "transports"}
    assert {"inproc", "shm"} <= set(transports)
    assert {(f["value"], f["problem"]) for f in transports.values()} == {("usable", None)}


def test_doctor_tells_the_network_for_other_hosts(capsys, monkeypatch):
    def finding():
        cli.main(["doctor", "--json"])
        findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
        return findings["network for other hosts"]

    assert finding()["problem"] is None
    monkeypatch.setenv("JAXFABRIC_NET_INTERFACE", "127.0.0.0/8")
    assert finding()["value"] == "lo, 127.0.0.1: net_interface has 127.0.0.0/8"
    monkeypatch.setenv("JAXFABRIC_NET_INTERFACE", "eth77")
    assert "net_interface eth77; there are: lo, 127.0.0.1" in finding()["problem"]


@pytest.mark.parametrize("count", ["x", "0", "-1", "1.5", ""])
def test_counts_are_whole_numbers(count, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", f"-n={count}", "x.py"])
    assert "is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("variable", ["JAXFABRIC_DEADLINE", "JAXFABRIC_ENABLE"])
def test_bad_settings_end_a_job_before_it_starts(variable, count, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(variable, "maybe")
    marker = tmp_path / "started"
    assert cli.main(["run", f"-n={count}", "--", "touch", str(marker)]) == 2
    assert f"{variable}=maybe: " in capsys.readouterr().err
    assert not marker.exists()


def test_doctor_points_at_bad_settings(capsys, monkeypatch):
    monkeypatch.setenv("JAXFABRIC_DEADLINE", "soon")
    monkeypatch.setenv("JAXFABRIC_DEADLNE", "3")
    monkeypatch.setenv("JAXFABRIC_ENABLE", "maybe")
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "JAXFABRIC_ENABLE=maybe: use" in output
    assert "did you mean JAXFABRIC_DEADLINE?" in output
    assert "JAXFABRIC_DEADLINE=soon" in output
