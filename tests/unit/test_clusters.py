import sys

import jax
import pytest

from jaxfabric import _compat
from jaxfabric.bootstrap import clusters
from jaxfabric.config import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-24960@1",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[008-009]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "NUM_PROCESSES": "4",
    "COORDINATOR_ADDRESS": "job-0.pods",
}


def place(job):
    return job.launcher, job.process_id, job.num_processes, job.local_id, job.local_count


def test_nothing():
    assert clusters.detect({"PATH": "/bin", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    assert clusters.detect({"WORLD_SIZE": "4", "SLURM_JOB_ID": "1"}) is None
    assert clusters.detect({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


def test_torchrun():
    job = clusters.detect(TORCHRUN)
    assert place(job) == ("torchrun", 5, 8, 1, 4)
    assert job.coordinator == "node1:29500"
    own_store = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "fd77::1"}
    assert clusters.detect(own_store).coordinator == "[fd77::1]:29501"


def test_open_mpi():
    job = clusters.detect(OPEN_MPI)
    assert place(job) == ("Open MPI", 1, 2, 1, 2)
    host, _, port = job.coordinator.rpartition(":")
    assert host == "127.0.0.1"
    assert 61440 <= int(port) < 65536
    assert clusters.detect(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}).coordinator == job.coordinator
    assert clusters.detect(OPEN_MPI | {"PMIX_NAMESPACE": "other@1"}).coordinator != job.coordinator
    hosts = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="-x JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        clusters.detect(hosts)
    named = clusters.detect(hosts | {"JAX_COORDINATOR_ADDRESS": "a:1234"})
    assert named.coordinator == "a:1234"
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    assert clusters.detect(hosts | uri).coordinator.startswith("10.96.0.1:")
    uri = {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    assert clusters.detect(hosts | uri).coordinator.startswith("[fe80::b9b]:")


def test_slurm():
    job = clusters.detect(SLURM)
    assert place(job) == ("Slurm", 3, 4, 1, 2)
    assert job.coordinator.startswith("n008:")
    assert clusters.detect(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != job.coordinator
    assert clusters.detect(SLURM | {"JAX_COORDINATOR_PORT": "77"}).coordinator == "n008:77"
    assert clusters.detect(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}).local_count is None
    # The script of a batch job is not one of its tasks.
    batch = {name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NODELIST"}
    assert clusters.detect(batch) is None


def test_kubernetes(monkeypatch):
    job = clusters.detect(KUBERNETES)
    assert place(job) == ("Kubernetes", 2, 4, None, None)
    assert job.coordinator == "job-0.pods:55527"
    kubeflow = KUBERNETES | {"PROCESS_ID": "3", "COORDINATOR_PORT": "6666"}
    job = clusters.detect(kubeflow)
    assert (job.process_id, job.coordinator) == (3, "job-0.pods:6666")
    indexed = {name: KUBERNETES[name] for name in KUBERNETES if name != "COORDINATOR_ADDRESS"}
    names = iter(["set-workers-0-2.set.ns.svc.cluster.local", "job-2", "job-2"])
    monkeypatch.setattr(clusters.socket, "getfqdn", lambda: next(names))
    assert clusters.detect(indexed).coordinator == (
        "set-workers-0-0.set.ns.svc.cluster.local:55527"
    )
    with pytest.raises(ConfigError, match=r"this pod is job-2, .* headless service"):
        clusters.detect(indexed)


def test_one_process_needs_no_coordinator():
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert clusters.detect(alone).num_processes == 1
    alone = {"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0", "NUM_PROCESSES": "1"}
    assert clusters.detect(alone).num_processes == 1


def test_the_inner_launcher_counts():
    everything = KUBERNETES | SLURM | OPEN_MPI | TORCHRUN
    for variables in (TORCHRUN, OPEN_MPI, SLURM, KUBERNETES):
        assert clusters.detect(everything) == clusters.detect(variables)
        everything = {name: everything[name] for name in everything if name not in variables}
    assert clusters.detect(everything) is None


def as_jax_finds_it(monkeypatch, environ, *given):
    """What jax.distributed.initialize makes of its arguments: address, count, number, GPUs."""
    for name in TORCHRUN | OPEN_MPI | SLURM | KUBERNETES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    envs = jax._src.clusters.ClusterEnv
    given = [*given, *[None] * (4 - len(given))]
    return envs.auto_detect_unset_distributed_params(*given, None, 1)


def test_jax_is_told_what_it_does_not_find_itself(monkeypatch):
    assert as_jax_finds_it(monkeypatch, {}) == (None, None, None, None)
    assert as_jax_finds_it(monkeypatch, TORCHRUN) == ("node1:29500", 8, 5, [1])
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.warns(UserWarning, match="the `kubernetes` package"):
        assert as_jax_finds_it(monkeypatch, KUBERNETES) == ("job-0.pods:55527", 4, 2, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert as_jax_finds_it(monkeypatch, TORCHRUN)[3] is None


def test_what_jax_finds_itself_stays_so(monkeypatch):
    port = 4711 % 4096 + 61440
    assert as_jax_finds_it(monkeypatch, SLURM | TORCHRUN) == (f"n008:{port}", 4, 3, [1])
    # A program that says all keeps the GPUs it has chosen, whatever the variables are worth.
    broken = TORCHRUN | {"RANK": "x"}
    for environ in (TORCHRUN, broken):
        assert as_jax_finds_it(monkeypatch, environ, "a:1", 2, 1) == ("a:1", 2, 1, None)
    with pytest.raises(ConfigError, match="RANK=x: use a whole number"):
        as_jax_finds_it(monkeypatch, broken)


def test_a_jax_without_such_environments_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.clusters", None)
    assert not _compat.register_cluster(lambda: None)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (TORCHRUN, {"MASTER_PORT": None}, "MASTER_PORT is not set, where RANK, WORLD_SIZE, MAST"),
        (TORCHRUN, {"RANK": None}, "RANK is not set, where WORLD_SIZE"),
        (TORCHRUN, {"RANK": "8"}, "process 8 of 8, numbered from 0 .RANK, WORLD_SIZE"),
        (TORCHRUN, {"RANK": "x"}, "RANK=x: use a whole number"),
        (TORCHRUN, {"MASTER_PORT": "99999"}, "MASTER_ADDR and MASTER_PORT=node1:99999: use host"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "process 4 of 4 on its host"),
        (TORCHRUN, {"JAX_COORDINATOR_ADDRESS": "a"}, "JAX_COORDINATOR_ADDRESS=a: use host:port"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE is not set, where"),
        (SLURM, {"SLURM_NTASKS": None}, "SLURM_NTASKS is not set"),
        (SLURM, {"SLURM_STEP_NUM_NODES": "3"}, r"n\[008-009\] names 2 node.*NUM_NODES is 3"),
        (SLURM, {"SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST=n\[1-: use names"),
        (KUBERNETES, {"NUM_PROCESSES": None}, "JOB_COMPLETION_INDEX=2, and NUM_PROCESSES is not"),
    ],
)
def test_variables_that_do_not_fit(base, changes, message):
    environ = {k: v for k, v in (base | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        clusters.detect(environ)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b2", ["a", "b2"]),
        ("n[001-003,7]", ["n001", "n002", "n003", "n7"]),
        ("n[9-11]-ib,x", ["n9-ib", "n10-ib", "n11-ib", "x"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[1,3],b[2]", ["a1", "a3", "b2"]),
    ],
)
def test_node_lists(text, names):
    assert list(clusters.expand_node_list(text)) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[", "n]", "n[]", "n[x]", "n[3-1]", "n[1-9999999999]", "n[[1]]"]
)
def test_broken_node_lists(text):
    with pytest.raises(ConfigError, match="use names such as"):
        list(clusters.expand_node_list(text))


@pytest.mark.parametrize(
    ("local_id", "local_count", "environ", "gpus"),
    [
        (1, 4, {}, [1]),
        (1, None, {}, [1]),
        (None, None, {}, None),
        (0, 1, {}, None),  # The only process of its host takes all.
        (1, 4, {"CUDA_VISIBLE_DEVICES": "3"}, None),  # Each has one of its own.
        (1, 4, {"CUDA_VISIBLE_DEVICES": "2,3"}, [1]),
        (1, 4, {"JAX_LOCAL_DEVICE_IDS": "2"}, None),
    ],
)
def test_each_process_takes_its_gpu(local_id, local_count, environ, gpus):
    job = clusters.ClusterJob(
        launcher="Slurm",
        coordinator="a:1",
        num_processes=4,
        process_id=1,
        local_id=local_id,
        local_count=local_count,
    )
    assert job.local_gpus(environ) == gpus


def test_doctor_says_what_initialize_would_find(capsys, monkeypatch):
    from jaxfabric import cli

    assert cli.main(["doctor"]) in (0, 1)
    assert "none: a job of one process" in capsys.readouterr().out
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    cli.main(["doctor"])
    assert "Slurm: process 3 of 4 at n008:" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "5")
    assert cli.main(["doctor"]) == 1
    assert "SLURM_STEP_NUM_NODES is 5" in capsys.readouterr().out
