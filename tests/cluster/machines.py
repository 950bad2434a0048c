"""Several machines with one shared folder, on one machine: each has its own network, processes, host name and mounts.

Every machine mounts the shared folder itself, with `bindfs`. As on some NFS and Lustre file systems, a lock (flock) that one
machine takes does then not exist for the other ones. Needs root, `bindfs`, and util-linux.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("bindfs", "unshare", "nsenter", "ip")
NAMESPACES = ("--net", "--uts", "--pid", "--mount")
SET_UP = 'hostname "$1" && ip link set lo up && mount -t proc proc /proc && bindfs "$2" "$2" && echo ready && exec sleep infinity'


def why_not() -> str | None:
    """Return why machines cannot be made here, or None if they can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"needs the programs {', '.join(missing)}"
    if subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True).returncode:
        return "needs the right to make namespaces"
    return None if os.access("/dev/fuse", os.W_OK) else "needs /dev/fuse"


class Machine:
    """A machine called `name`, which sees the folder `shared` under the same path as all others."""

    def __init__(self, name: str, shared: Path):
        self.name, self.shared = name, shared
        self.boot()

    def boot(self):
        """Start the machine, also after a crash."""
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "sh", "-c", SET_UP, "sh", self.name, str(self.shared)]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "ready\n":
            raise OSError(f"machine {self.name} did not start")
        (self.first,) = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()

    def start(self, *command: str, output: Path, **options) -> subprocess.Popen:
        """Start a command on the machine, and append what it prints to the file `output`. `options` are those of `Popen`."""
        enter = ["nsenter", f"--target={self.first}", *NAMESPACES, "sh", "-c", 'cd "$0" && exec "$@"', str(self.shared)]
        with open(output, "ab") as file:
            return subprocess.Popen([*enter, *command], stdout=file, stderr=file, **options)

    def crash(self):
        """Kill all processes of the machine at once with SIGKILL, as if its power had failed."""
        os.kill(int(self.first), signal.SIGKILL)  # with the first process of a machine, the kernel kills all others
        self.holder.wait()


@contextmanager
def machines(shared: Path, *names: str) -> Iterator[list[Machine]]:
    """Context manager that yields machines with these names, and stops them. `shared` is the folder that all of them mount."""
    with ExitStack() as stack:
        found = []
        for name in names:
            found.append(machine := Machine(name, shared))
            stack.callback(stop, machine)
        yield found


def stop(machine: Machine):
    """Stop a machine, unless it has crashed."""
    if machine.holder.poll() is None:
        machine.crash()
