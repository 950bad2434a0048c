"""A real SLURM for the tests, in user space: munged, slurmctld and one slurmd for each node, all on this machine.

`python tests/cluster/slurm.py FOLDER` starts it and stops it at Ctrl-C, to try something out by hand. It needs the programs of
Debian's `slurm-wlm` and `munge`, no root and no systemd. All files lie in one folder, and the network is the loopback.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # the daemons are not on the PATH of users
MISSING = [program for program in PROGRAMS if shutil.which(program, path=SEARCHED) is None]
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout={timeout}
KillWait=5
MinJobAge=86400
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """A running SLURM. Its jobs may be preempted by jobs in the partition `high`.

    folder       configuration, state and logs
    environment  the environment variables with which the commands of SLURM find it
    daemons      the processes by name: "munged", "slurmctld", and the names of the nodes
    """

    def __init__(self, folder: Path, nodes: int, cpus: int, timeout: int):
        self.folder, self.names = folder, [f"n{number}" for number in range(1, nodes + 1)]
        for part in ("state", "log", *(f"spool/{name}" for name in self.names)):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self.configuration, ports = folder / "slurm.conf", free_ports(nodes + 1)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            for name, port in zip(self.names, ports[1:])
        ]
        text = CONFIGURATION.format(
            host=host, port=ports[0], folder=folder, user=getuser(), timeout=timeout, nodes="\n".join(lines)
        )
        self.configuration.write_text(text)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment |= {"SLURM_CONF": str(self.configuration), "PATH": SEARCHED}
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self, name: str):
        """Start a daemon: "munged", "slurmctld", or the slurmd of a node by the name of the node."""
        munged = [f"--socket={self.folder}/munge.socket"]
        munged += [f"--{part}-file={self.folder}/munge.{part}" for part in ("key", "pid", "log", "seed")]
        commands = {
            "munged": ["munged", "--foreground", "--force", "--num-threads=10", *munged],
            "slurmctld": ["slurmctld", "-D", "-f", str(self.configuration)],
        }
        command = commands.get(name, ["slurmd", "-D", "-N", name, "-f", str(self.configuration)])
        command[0] = shutil.which(command[0], path=SEARCHED) or command[0]
        with open(self.folder / "log" / f"{name}.out", "ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )

    def kill(self, name: str):
        """Kill a daemon with SIGKILL. The jobs of a node go on without its slurmd."""
        self.daemons[name].kill()
        self.daemons.pop(name).wait()

    def call(self, *command: str) -> str:
        """Run a command of SLURM and return what it printed. Raises CalledProcessError if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout

    def nodes(self) -> dict[str, str]:
        """Return a dict from each node to its state, such as "idle" or "down"."""
        return dict(line.split() for line in self.call("sinfo", "-h", "-N", "-p", "low", "-o", "%N %t").splitlines())

    def jobs(self) -> dict[str, str]:
        """Return a dict from each job, such as "12" or "12_3", to its state, such as "RUNNING", also for jobs that ended."""
        lines = self.call("squeue", "-h", "-r", "-t", "all", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def running(self, array: str) -> dict[str, str]:
        """Return a dict from each running job of an array, such as "12_3", to its node."""
        lines = self.call("squeue", "-h", "-r", "-j", array, "-t", "running", "-o", "%i %N").splitlines()
        return dict(line.split() for line in lines)

    def processes(self, **variables: str) -> list[int]:
        """Return the numbers of the processes that belong to this SLURM, and that have these environment variables."""
        wanted = {f"{name}={value}".encode() for name, value in {"SLURM_CONF": str(self.configuration), **variables}.items()}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted <= set(path.read_bytes().split(b"\0")):
                    found.append(int(path.parent.name))
        return found

    def stop(self):
        """Cancel all jobs and end all processes of this SLURM."""
        with suppress(subprocess.SubprocessError):
            self.call("scancel", f"--user={getuser()}")
            wait_until(lambda: not self.call("squeue", "-h"), 30, lambda: "jobs were cancelled and did not end")
        for name in ("slurmctld", *self.names, "munged"):
            if daemon := self.daemons.pop(name, None):
                daemon.terminate()
                daemon.wait(30)
        for process in self.processes():
            if process != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@contextmanager
def slurm_cluster(folder: Path, *, nodes: int = 2, cpus: int = 1, timeout: int = 15) -> Iterator[Cluster]:
    """Context manager that starts SLURM with files in `folder`, yields it as a `Cluster`, and stops it. It has `nodes` nodes with
    `cpus` CPUs each, whatever this machine has. A node that does not answer for `timeout` seconds counts as lost.
    """
    cluster = Cluster(folder, nodes, cpus, timeout)
    try:
        cluster.start("munged")
        wait_until((folder / "munge.socket").exists, 30, lambda: (folder / "log/munged.out").read_text())
        for name in ("slurmctld", *cluster.names):
            cluster.start(name)

        def ready() -> bool:
            with suppress(subprocess.SubprocessError):
                return set(cluster.nodes().values()) == {"idle"}
            return False

        wait_until(ready, 60, lambda: (folder / "log/slurmctld.out").read_text()[-2000:])
        yield cluster
    finally:
        cluster.stop()


def wait_until(condition: Callable[[], object], seconds: float, problem: Callable[[], str] = lambda: ""):
    """Wait until `condition()` is true. Raises TimeoutError after so many seconds, with the text that `problem()` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {seconds:g} s: {problem()}")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Return so many ports of the loopback that no process uses."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def main():
    """Start SLURM in the folder that the command line names, print how to use it, and stop it at Ctrl-C."""
    if len(sys.argv) != 2 or MISSING:
        sys.exit(f"missing programs: {', '.join(MISSING)}" if MISSING else __doc__)
    with slurm_cluster(Path(sys.argv[1]).absolute()) as cluster:
        print(f"export SLURM_CONF={cluster.configuration}\nCtrl-C stops it", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
