"""A recipe of 64 runs on a real SLURM with two nodes. Daemons, jobs and processes are killed: nothing is lost or doubled."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from equal_results import check_equal
from slurm import MISSING, Cluster, slurm_cluster, wait_until

from smallvit.launch.status import FILE

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"needs SLURM: {', '.join(MISSING)} (Debian: slurm-wlm, munge)"),
]
ROOT = Path(__file__).parents[2]
HOUR = 3600.0
RECIPE = '''
"""Which of four settings is best?"""
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, augment
from smallvit.train import loop

loop.CHECKPOINT_SECONDS = 1.0  # so that short runs are interrupted between two checkpoints
short = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2), labels=50, val=20, steps=400,
            batch=8, augment=augment.digits())
arms = {"scratch": short, "+LSA": short.vary(attention=LocalityAttention), "fast": short.vary(lr=2e-3),
        "continued": short.vary(steps=200, init=short.vary(steps=200, lr=3e-3))}
RUNS = ablate(arms, labels=[50], seeds=range(16), references=False)
'''
SHARDS = 8
SUBMIT = ("mine.py", "--on", "slurm", "--jobs", str(SHARDS), "--sbatch", "-t 2 --signal=B:USR1@15")


def smallvit(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a command of smallvit in the working directory."""
    return subprocess.run([sys.executable, "-m", "smallvit", *words], env=environment, capture_output=True, text=True)


def submit(cluster: Cluster) -> tuple[str, str]:
    """Submit the recipe, and return the numbers of the array and of the job that writes the report."""
    done = smallvit("run", *SUBMIT, environment=cluster.environment)
    found = re.search(r"jobs \((\d+)\).*one \((\d+)\)", done.stdout)
    assert found, done.stdout + done.stderr
    return found[1], found[2]


def log(job: str) -> str:
    path = Path(f"runs/mine/slurm/{job}.log")
    return path.read_text(errors="replace") if path.exists() else ""


def trains(cluster: Cluster, job: str) -> bool:
    """Return whether a run of a job is in training: its folder has the file with the progress, which names the process."""
    processes = cluster.processes(SLURM_ARRAY_TASK_ID=job.partition("_")[2])
    for path in Path("runs").rglob(FILE):
        with suppress(OSError, ValueError):  # the run has just ended
            if json.loads(path.read_text())["pid"] in processes:
                return True
    return False


def launchers(cluster: Cluster, job: str) -> list[int]:
    """The processes of `smallvit run` in a job of an array: the children of its script, not those of its workers."""
    found = []
    for process in cluster.processes(SLURM_ARRAY_TASK_ID=job.partition("_")[2]):
        command = Path(f"/proc/{process}/cmdline")
        if command.exists() and b"smallvit\0run" in command.read_bytes():
            found.append(process)
    return found


class Faults:
    """Makes faults happen in the jobs of an array, each in a job that is training and in which none has happened before."""

    def __init__(self, cluster: Cluster, array: str):
        self.cluster, self.array, self.hit = cluster, array, {}

    def strike(self, fault: str, action: Callable[[str], object] = lambda job: None, node: str = "") -> str:
        """Wait for a job that is training, on this node if one is named, call `action(job)`, and return the job. If the job has
        been started again just before, because of its time limit, try another one.
        """
        deadline = time.monotonic() + HOUR
        while time.monotonic() < deadline:
            for job, place in self.cluster.running(self.array).items():
                with suppress(subprocess.CalledProcessError, ProcessLookupError, IndexError):
                    if place.endswith(node) and job not in self.hit.values() and trains(self.cluster, job):
                        action(job)
                        self.hit[fault] = job
                        return job
            time.sleep(0.2)
        raise TimeoutError(f"no job for {fault}: {self.cluster.jobs()}")

    def freeze_node(self):
        """Kill the slurmd of a node, and stop the processes of its job as a node that hangs does: they keep their locks. SLURM
        starts the job again on the other node. Then the node comes back, and SLURM kills what was left there.
        """
        frozen: list[int] = []

        def freeze(job: str):
            for process in self.cluster.processes(SLURM_ARRAY_TASK_ID=job.partition("_")[2]):
                os.kill(process, signal.SIGSTOP)
                frozen.append(process)

        job = self.strike("slurmd killed, node frozen", freeze, "n1")
        self.cluster.kill("n1")
        wait_until(lambda: self.cluster.jobs()[job] == "PENDING", HOUR, lambda: f"{job} was not requeued")
        self.cluster.call("scontrol", "update", f"JobId={job}", "Priority=4294967000")  # before the other jobs
        wait_until(lambda: "trained by another process" in log(job), HOUR, lambda: f"{job} met no lock: {log(job)}")
        self.cluster.start("n1")
        wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in frozen), HOUR, lambda: f"{frozen} live")

    def kill_daemon(self):
        """Kill the slurmd of a node and start it again soon: the job goes on."""
        self.strike("slurmd killed and started", lambda job: self.cluster.kill("n2"), "n2")
        time.sleep(2)
        self.cluster.start("n2")

    def kill_step(self):
        """Kill the processes of a job. For SLURM, this is the end of the job."""
        job = self.strike("step killed", lambda job: self.cluster.call("scancel", "--signal=KILL", "--batch", job))
        wait_until(lambda: self.cluster.jobs()[job] == "FAILED", HOUR, lambda: self.cluster.jobs()[job])

    def kill_launcher(self):
        """Kill the process of `smallvit run` in a job, as the kernel does when memory is short."""
        self.strike("launcher killed", lambda job: os.kill(launchers(self.cluster, job)[0], signal.SIGKILL))

    def warn(self):
        """Send the signal that announces a preemption."""
        self.strike("preempted, with a signal", lambda job: self.cluster.call("scancel", "--signal=USR1", "--batch", job))

    def preempt(self):
        """Submit a job with a higher priority, for which SLURM stops another one."""
        command = ("sbatch", "-p", "high", "-w", "n2", "--exclusive", "--output=high.txt", "--wrap", "sleep 5")
        self.strike("preempted, without a signal", lambda job: self.cluster.call(*command), "n2")

    def requeue(self):
        """Requeue a job by hand."""
        self.strike("requeued by hand", lambda job: self.cluster.call("scontrol", "requeue", job))


def ended(cluster: Cluster, *jobs: str) -> bool:
    """Whether all jobs, and all jobs of an array, have ended for good."""
    states = {state for job, state in cluster.jobs().items() if job.partition("_")[0] in jobs}
    return states <= {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED"}


def restarts(cluster: Cluster, array: str) -> list[int]:
    return [int(count) for count in re.findall(r"Restarts=(\d+)", cluster.call("scontrol", "show", "job", array))]


def test_nothing_is_lost_or_doubled_when_nodes_jobs_and_processes_are_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("mine.py").write_text(RECIPE)
    started = time.monotonic()
    with slurm_cluster(tmp_path / "slurm", timeout=5) as cluster:
        array, report = submit(cluster)
        faults = Faults(cluster, array)
        for fault in (
            faults.freeze_node, faults.kill_step, faults.kill_daemon, faults.kill_launcher, faults.warn, faults.preempt,
            faults.requeue,
        ):  # fmt: skip
            fault()
        wait_until(lambda: ended(cluster, array, report), HOUR, lambda: str(cluster.jobs()))
        states = cluster.jobs()
        killed = faults.hit["step killed"]
        assert [job for job, state in states.items() if state != "COMPLETED" and job.startswith(f"{array}_")] == [killed]
        assert "0 of 64" not in log(f"{report}_report") and "are still to be trained" in log(f"{report}_report")
        counts = restarts(cluster, array)
        again, last = submit(cluster)
        wait_until(lambda: ended(cluster, again, last), HOUR, lambda: str(cluster.jobs()))
        second = [job.partition("_")[2] for job in cluster.jobs() if job.startswith(f"{again}_")]
        assert second == [killed.partition("_")[2]], "only the shard that was lost is submitted again"
        assert cluster.jobs()[last] == "COMPLETED"
    text = "".join(path.read_text(errors="replace") for path in Path("runs/mine/slurm").glob("*_[0-9]*.log"))
    seconds = time.monotonic() - started
    done = smallvit("run", "mine.py", "--jobs", "2", "--out", "whole", environment=dict(os.environ))
    assert done.returncode == 0, done.stderr
    figures = {
        "faults": faults.hit,
        "jobs": SHARDS,
        "starts again": sum(counts),
        "signals before the time limit or a preemption": text.count("SLURM is asked to start it again"),
        "waits for locks": text.count("ended with status 75"),
        "minutes": round(seconds / 60, 1),
        **check_equal(Path("runs/mine"), Path("whole/mine")),
    }
    with capsys.disabled():
        print(f"\n{json.dumps(figures, indent=1)}")
