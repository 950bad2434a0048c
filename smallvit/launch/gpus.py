"""The GPUs of one machine: which of them `smallvit run --gpus` uses, and which worker process gets which one.

A worker process (a process that trains runs) sees one GPU only, because the environment variable CUDA_VISIBLE_DEVICES names
one. It is set before the process starts, and so before it imports torch.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARING = 4  # worker processes on each GPU with `--device cuda`; while one waits for its CPU, the others use the GPU
TIMEOUT = 60  # seconds for nvidia-smi, which may have to start the driver


def cuda_for_auto(device: str) -> str:
    """Return "cuda" in the place of "auto" if this machine has a GPU for CUDA, so that all of its GPUs are used. Otherwise
    return `device` as it is.
    """
    import torch

    return "cuda" if device == "auto" and torch.cuda.is_available() else device


def gpu_workers(gpus: str | None, per_gpu: int | None, jobs: int | None, device: str) -> list[str]:
    """Return the GPU of each worker process that is started, as values of CUDA_VISIBLE_DEVICES. A GPU that several
    processes share occurs several times. `gpus` is the value of `--gpus`, or None without this option, `per_gpu` is the number
    of processes that share a GPU, `jobs` is the value of `--jobs`, and `device` the device, which must be CUDA with `--gpus`.

    Without `--gpus`, a CUDA device means all GPUs of this machine, with `jobs` processes in all, or four on each. The list is
    empty for another device, and if there is no GPU. Processes that are started first get different GPUs.

    Raises ValueError for a GPU that is not there or is named twice, and for options that contradict each other.
    """
    if not gpus:
        visible = visible_gpus(os.environ) if device == "cuda" else []
        return [visible[number % len(visible)] for number in range(jobs or SHARING * len(visible))] if visible else []
    if device != "cuda":
        raise ValueError(f"--gpus {gpus} and --device {device} cannot be combined: --gpus means CUDA; remove one of them")
    names = chosen_gpus(gpus, visible_gpus(os.environ)) * (per_gpu or 1)
    if jobs not in (None, len(names)):
        text = f"--gpus {gpus}" + f" --per-gpu {per_gpu}" * (per_gpu is not None)
        raise ValueError(
            f"--jobs {jobs} and {text} cannot be combined: {text} means {len(names)} worker processes; remove --jobs, and set "
            "the number of processes on each GPU with --per-gpu"
        )
    return names


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them: numbers, or names such as
    GPU-5d5ba0d6 or MIG-c7384736 (a part of a GPU). `environment` has the environment variables. If CUDA_VISIBLE_DEVICES is set,
    only its GPUs are returned.

    CUDA itself is not initialized.
    """
    if VISIBLE not in environment:
        return listed_gpus()
    names: list[str] = []
    for name in environment[VISIBLE].split(","):
        if not name.strip() or name.strip().startswith("-"):  # CUDA ignores this entry and all after it
            break
        names.append(name.strip())
    return names


def listed_gpus() -> list[str]:
    """Return the names of all GPUs of this machine, as CUDA_VISIBLE_DEVICES writes them. They are what `nvidia-smi -L` lists.
    If there is no such program, the GPUs are counted by torch. A GPU that is divided into parts (MIG) is replaced by its parts,
    because CUDA can use only one part in a process.
    """
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        import torch

        return [str(index) for index in range(torch.cuda.device_count())]
    return parse_list(done.stdout) if done.returncode == 0 else []


def parse_list(text: str) -> list[str]:
    """Return the names of the GPUs in the output of `nvidia-smi -L`. A GPU has its UUID as name, because its number may differ
    between nvidia-smi and CUDA. A GPU that is divided into parts (MIG) is replaced by the UUIDs of its parts.
    """
    gpus: list[list[str]] = []
    for line in text.splitlines():
        uuid = line.partition("(UUID: ")[2].partition(")")[0]
        if uuid and line.startswith("GPU "):
            gpus.append([uuid])
        elif uuid and gpus:
            gpus[-1].append(uuid)
    return [name for gpu, *parts in gpus for name in (parts or [gpu])]


def chosen_gpus(gpus: str, visible: Sequence[str]) -> list[str]:
    """Return the names of the chosen GPUs. `gpus` is "all", or a list such as "0,2": positions among the GPUs in `visible`,
    which this process may use, or names such as GPU-5d5ba0d6. The beginning of such a name is enough.

    Raises ValueError for a GPU that is not there or is named twice.
    """
    if not visible:
        set_to = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
        raise ValueError(f"--gpus {gpus}: this process can use no GPU{set_to}; leave out --gpus to train on the CPU")
    if gpus == "all":
        return list(visible)
    names = []
    for text in gpus.split(","):
        fitting = [name for name in visible if not text.isdecimal() and text and name.startswith(text)]
        if text.isdecimal() and int(text) < len(visible):
            fitting = [visible[int(text)]]
        if len(fitting) != 1:
            last = len(visible) - 1
            numbers = "0" if last == 0 else f"numbers from 0 to {last}"
            wrong = "fits several" if len(fitting) > 1 else "is not one"
            raise ValueError(
                f"--gpus {gpus}: {text!r} {wrong} of the GPUs that this process can use ({', '.join(visible)}); expected all, "
                f"or {numbers}, which are positions in this list, or names that are no numbers, separated by commas"
            )
        names += fitting
    if len(set(names)) < len(names):
        raise ValueError(f"--gpus {gpus} has a GPU twice; expected each once, and --per-gpu 2 for two processes on each GPU")
    return names
