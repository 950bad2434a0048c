"""SLURM: training the runs of a recipe as an array of jobs on a cluster, and a last job that writes the report.

Each job of the array trains one shard (a fixed part of the runs) with `smallvit run --shard`. SLURM queues the jobs, gives them
nodes and GPUs, and starts them again after a lost node. The jobs share nothing but the folder of the results, so the file
system must be visible on the login node and on all nodes.

A job that comes near its time limit, or that is preempted, gets a signal. Its script then stops the training, which continues
later from checkpoints that are at most 10 seconds old, and asks SLURM to start the job again (a requeue). SLURM ends a job for
good when its script exits with status 0, so the script exits with 0 only if all runs of the shard have finished. A job is not
started again without end: see `MOST_RESTARTS`.

The library submitit is not used. It pickles functions and results, and a shard has neither: its command line is the job, and
its records are the results. It needs the accounting of SLURM (`sacct`), which many clusters switch off. And its handling of the
time limit needs an object with a method `checkpoint`, which is pickled, too; runs write checkpoints themselves.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from smallvit import record as records
from smallvit.ablation import ArmRun, with_dependencies
from smallvit.storage import write_text
from smallvit.words import how_many

from .results import Damaged, recall
from .scheduler import is_untrained, read_data, unavailable_weights
from .shards import BUSY, divide

PASSED_ON = (  # options of `smallvit run` that each job gets as they were given
    "--out", "--scale-steps", "--device", "--stack", "--numerics", "--only", "--retry", "--fail-fast", "--gpus", "--per-gpu",
)  # fmt: skip
HERE = ("--on", "--jobs", "--sbatch", "--dry-run")  # options of `smallvit run` that are used when the jobs are submitted
QUEUE = (  # options of sbatch that the job of the report gets, too; it needs no GPU and one CPU
    "partition", "account", "qos", "reservation", "clusters", "constraint", "time", "mail-user", "mail-type",
)  # fmt: skip
SHORT = {  # short options of sbatch with a meaning for this file
    "a": "array", "A": "account", "C": "constraint", "J": "job-name", "M": "clusters", "N": "nodes", "o": "output",
    "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip
FINDS_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")  # environment variables that sbatch itself needs
SIGNAL = "B:USR1@90"  # SLURM sends USR1 to the script so many seconds before the time limit
STOPPING = 20  # seconds in which the training must end after the signal
MOST_JOBS = 100_000  # of an array; also the most parts of `smallvit run --shard`
MOST_RESTARTS = 10  # a job that was started more often is not started again if no job of the array has saved anything lately

ARRAY = """\
# Trains the runs of {recipe}; each job of this array trains one part of them. Written by `smallvit run --on slurm`.
{setup}
job="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"  # SLURM_JOB_ID would name the whole array in its last job
{command} \\
    --shard "$SLURM_ARRAY_TASK_ID/{jobs}"{workers} &
training=$!
warned=
trap 'warned=yes; kill -TERM "$training"; (sleep {stopping}; kill -KILL "$training") 2> /dev/null &' {signal}
while true; do
    wait "$training"  # the signal interrupts it
    status=$?
    kill -0 "$training" 2> /dev/null || break
done

# Ask for a requeue after the signal, if the training was killed (137), or if some of its runs are trained by another process or
# were interrupted, for example by a full disk ({busy}).
# Not after other exits: 0 means that all runs have finished, and 1 that runs have failed, which would fail again.
case "$warned $status" in
    *" 0") exit 0 ;;
    yes* | *" 137" | *" {busy}") ;;
    *) exit "$status" ;;
esac
# A new record alone is no progress: that of a run which is out of memory is written again each time.
saved=$(find {results} -newermt "$((SECONDS + 2)) seconds ago" \\( -name {checkpoint} -o -name {weights} \\) -print -quit)
if [ -z "$saved" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -ge {most} ]; then
    echo "smallvit: $job was started again $SLURM_RESTART_COUNT times, and no job has made progress since the last time;" \\
        "it is not started again; give it a longer time limit or more memory" >&2
    exit 1
fi
echo "smallvit: $job ended with status $status before its runs had finished; SLURM is asked to start it again" >&2
scontrol requeue "$job" || exit 1
sleep 600  # SLURM ends this script before that; an exit could count as the end of the job
exit 1
"""
REPORT = """\
# Writes the report of {recipe} when all jobs of the array have ended. Written by `smallvit run --on slurm`.
{setup}
exec {command}
"""


def submit(options: argparse.Namespace, recipe: str, out: Path, runs: Sequence[ArmRun], recipe_runs: Sequence[ArmRun]):
    """Submit runs of a recipe file to SLURM: an array of jobs that train, and a job that waits for their end and writes the
    report. Print the numbers of the jobs. `options` are the arguments of `smallvit run`, `recipe` is the name of the recipe
    file, `out` the folder of all results, `runs` are the runs to train, and `recipe_runs` all runs of the recipe.

    A shard (one of `--jobs` parts of the runs) that has nothing left to train gets no job. The scripts and the output of the
    jobs are written to the folder `out/recipe/slurm`. With `--dry-run`, the scripts are printed and nothing is submitted. Data
    sets and pretrained weights are downloaded here, because nodes often have no network.

    Raises ValueError for options of sbatch that do not suit the jobs, and if SLURM refuses a job or is not installed.
    """
    given = parse_sbatch(options.sbatch)
    check(options, given)

    def is_left(entry: ArmRun) -> bool:
        try:
            return is_untrained(recall(entry, out, recipe), options.retry)
        except Damaged:
            return True

    shards = divide(runs, recipe_runs, options.jobs, options.stack or 1)
    todo = {number: [entry for entry in shard if is_left(entry)] for number, shard in enumerate(shards, 1)}
    left = [number for number, entries in todo.items() if entries]
    results = (Path(out) / recipe).absolute()
    folder = results / "slurm"
    if not left:
        print("nothing to submit: all runs have finished, or have failed (--retry trains these again)")
        return
    scripts = {
        "array.sh": array_script(options, given, recipe, results, left),
        "report.sh": report_script(options, given, recipe, folder),
    }
    if options.dry_run:
        for name, script in scripts.items():
            print(f"{folder / name}:\n\n{script}")
        print("dry run: nothing was submitted; the second job waits for the first (--dependency=afterany)")
        return
    entries = [entry for number in left for entry in todo[number]]
    fetch(entries)
    for name, script in scripts.items():
        write_text(folder / name, script)
    array = sbatch(folder / "array.sh")
    stop = "scancel " + " ".join(reversed(array.replace(";", ";-M ").split(";")))  # 12;cluster -> -M cluster 12
    again = f"smallvit report {shlex.join(words(options, ('--out', '--scale-steps')))}"
    try:
        report = sbatch(folder / "report.sh", f"--dependency=afterany:{array.partition(';')[0]}")
    except ValueError as error:
        raise ValueError(
            f"the training was submitted as {array}, but the job that writes the report was not: {error}; "
            f"write it yourself when it has ended: {again}; or cancel it: {stop}"
        ) from error
    jobs = how_many(len(left), "job")
    print(f"submitted: {jobs} ({array}) for {how_many(len(entries), 'run')}; then one ({report}) writes the report")
    print(f"progress:  smallvit status {shlex.join(words(options, ('--out', '--scale-steps')))}")
    print(f"output:    {folder}")
    print(f"cancel:    {stop} {report.partition(';')[0]}")
    print("If jobs are lost, or runs are missing in the report, the same command submits what is left.")


def check(options: argparse.Namespace, given: Sequence[tuple[str, list[str]]]):
    """Raise ValueError if the number of jobs is missing or too large, if the device is unknown, or if an option of sbatch does
    not suit the jobs. `options` are the arguments of `smallvit run`, and `given` the options of sbatch, as `parse_sbatch`
    returns them.
    """
    if options.jobs is None:
        raise ValueError("--on slurm needs --jobs N, the number of jobs to submit; more jobs than nodes balance the load")
    if options.jobs > MOST_JOBS:
        raise ValueError(f"--jobs is {options.jobs}; expected at most {MOST_JOBS:,} with --on slurm; give a smaller number")
    if options.device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device is {options.device!r}; expected cpu, cuda or auto on a SLURM cluster")
    if (options.gpus or options.per_gpu) and options.device != "cuda":
        raise ValueError(f"--gpus and --per-gpu choose GPUs, and the jobs have --device {options.device}; add --device cuda")
    values = {name: " ".join(found).partition("=")[2] or " ".join(found[1:]) for name, found in given}
    for name, advice in (("array", "--jobs sets it"), ("wrap", "smallvit writes the script"), ("wait", "remove it")):
        if name in values or (name == "wait" and "W" in values):
            raise ValueError(f"--sbatch contains the option {name}, which is not allowed: {advice}")
    if values.get("nodes", "1") not in ("1", "1-1"):
        raise ValueError(f"--sbatch asks for {values['nodes']} nodes; expected 1, because each job of the array uses one node")
    if "signal" in values and trapped(values["signal"]) is None:
        raise ValueError(
            f"--sbatch contains --signal={values['signal']}; expected --signal=B:USR1@SECONDS or B:USR2@SECONDS, which "
            "reaches the script (B:) and has no other meaning"
        )


def trapped(signal: str) -> str | None:
    """Return which signal ("USR1" or "USR2") the option `--signal` of sbatch sends to the script, or None if it sends none of
    these. `signal` is the value of the option, such as "B:USR1@90".
    """
    found = re.fullmatch(r"(?:B|BR|RB):(?:SIG)?(USR1|USR2|10|12)(?:@\d+)?", signal.upper())
    return {"10": "USR1", "12": "USR2"}.get(found[1], found[1]) if found else None


def parse_sbatch(text: str) -> list[tuple[str, list[str]]]:
    """Split the options of sbatch in a text, and return a list of pairs: the long name of the option, such as "partition", and
    the words as they were given, such as ["-p", "gpu"].

    Raises ValueError if the text is no list of options.
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--sbatch got {text!r}, which cannot be split into options ({error}); close the quotes") from error
    found: list[tuple[str, list[str]]] = []
    for word in parts:
        if word.startswith("--") and len(word) > 2:
            found.append((word[2:].partition("=")[0], [word]))
        elif word.startswith("-") and len(word) > 1:
            found.append((SHORT.get(word[1], word[1]), [word] if len(word) == 2 else [word[:2], word[2:]]))
        elif found and len(found[-1][1]) == 1 and "=" not in found[-1][1][0]:
            found[-1][1].append(word)
        else:
            raise ValueError(f"--sbatch got {text!r}, in which {word!r} is no option; expected, for example, '-p gpu -t 60'")
    return found


def directives(ours: dict[str, str], given: Sequence[tuple[str, list[str]]]) -> str:
    """Return the first lines of a script for sbatch: `#SBATCH` lines with the options `ours`, from name to value, except those
    that the user has set, and then the options of the user, `given`.
    """
    names = {name for name, _ in given}
    if names & {"requeue", "no-requeue"}:
        names |= {"requeue"}
    lines = [[f"--{name}={value}" if value else f"--{name}"] for name, value in ours.items() if name not in names]
    return "".join(f"#SBATCH {shlex.join(line)}\n" for line in [*lines, *(found for _, found in given)])


def array_script(
    options: argparse.Namespace, given: Sequence[tuple[str, list[str]]], recipe: str, results: Path, left: Sequence[int]
) -> str:
    """Return the script of the jobs that train. `options` are the arguments of `smallvit run`, `given` the options of sbatch,
    `recipe` is the name of the recipe file, `results` the folder of its runs, and `left` are the numbers of the shards with
    runs to train.

    A job has as many worker processes as SLURM gives it CPUs; with `--device cuda`, as many as it has GPUs.
    """
    ours = {
        "job-name": f"smallvit-{recipe}",
        "array": ranges(left),
        "nodes": "1",
        "output": log_file(results / "slurm" / "%A_%a.log"),
        "open-mode": "append",
        "requeue": "",
        "signal": SIGNAL,
    }
    signal = next((found for name, found in reversed(given) if name == "signal"), [f"--signal={SIGNAL}"])
    workers = ' --jobs "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}"'
    if options.device == "cuda":  # a worker process for each GPU of the job
        workers = "" if options.gpus else " --gpus all"
    body = ARRAY.format(
        recipe=recipe,
        setup=setup(),
        command=shlex.join([sys.executable, "-m", "smallvit", "run", *words(options, PASSED_ON)]),
        jobs=options.jobs,
        workers=workers,
        signal=trapped(" ".join(signal).partition("=")[2] or signal[-1]),
        stopping=STOPPING,
        busy=BUSY,
        results=shlex.quote(str(results)),
        checkpoint=records.CHECKPOINT,
        weights=records.WEIGHTS,
        most=MOST_RESTARTS,
    )
    return f"#!/bin/bash\n{directives(ours, given)}\n{body}"


def report_script(options: argparse.Namespace, given: Sequence[tuple[str, list[str]]], recipe: str, folder: Path) -> str:
    """Return the script of the job that writes the report. `options` are the arguments of `smallvit run`, `given` the options
    of sbatch, of which the job gets those that choose its queue. `recipe` is the name of the recipe file, and `folder` that of
    the scripts.
    """
    ours = {"job-name": f"smallvit-{recipe}-report", "output": log_file(folder / "%j_report.log")}
    command = shlex.join([sys.executable, "-m", "smallvit", "report", *words(options, ("--out", "--scale-steps"))])
    kept = [(name, found) for name, found in given if name in QUEUE]
    return f"#!/bin/bash\n{directives(ours, kept)}\n{REPORT.format(recipe=recipe, setup=setup(), command=command)}"


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text, as sbatch reads them: "1-3,7" for 1, 2, 3 and 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def log_file(path: Path) -> str:
    """Return the path of a log file for sbatch, which replaces codes such as `%A` in the name. A `%` in the folder is kept."""
    return str(path.parent).replace("%", "%%") + f"/{path.name}"


def setup() -> str:
    """Return the shell commands that give a job the working directory and the environment variables `SMALLVIT_*` of this
    process.
    """
    kept = [f"export {name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith("SMALLVIT_")]
    return "\n".join([f"cd {shlex.quote(os.getcwd())} || exit 1", *kept])


def words(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Return the recipe and the options `flags`, as they were given on the command line, as a list of words. `options` are the
    arguments of `smallvit run`.
    """
    found = [options.recipe]
    for flag in flags:
        value = getattr(options, flag.removeprefix("--").replace("-", "_"), None)
        if value is True:
            found.append(flag)
        elif value and (flag, value) != ("--scale-steps", 1):
            found += [flag, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return found


def fetch(runs: Sequence[ArmRun]):
    """Load the data sets of runs and download the pretrained weights that they use, so that jobs find them on nodes without a
    network. Print which weights are unavailable. `runs` are the runs that are to be trained.

    Raises ValueError if the data cannot be read or have no test images.
    """
    needed = with_dependencies(runs)[0]
    for data in dict.fromkeys(entry.run.data for entry in needed):
        read_data(data).check_test_images()
    for reason in unavailable_weights(entry.run for entry in needed).values():
        print(f"unavailable: {reason}; the runs that need these weights are left out", file=sys.stderr)


def sbatch(script: Path, *options: str) -> str:
    """Submit a script with the command sbatch, and return the number of its job, such as `12` or `12;cluster`. `options` are
    options of sbatch.

    The variables that describe a job are left out of the environment: if this process runs inside a job, they are not those of
    the new job.

    Raises ValueError with what sbatch said.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in FINDS_SLURM}
    command = ["sbatch", "--parsable", *options, str(script)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(
            f"sbatch cannot be started ({error.strerror}); expected the commands of SLURM on this machine; use a login node of "
            "the cluster, or look at the scripts with --dry-run"
        ) from error
    if done.returncode or not done.stdout.strip():
        said = " ".join(line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines()) or f"exit {done.returncode}"
        raise ValueError(f"sbatch refused {script}: {said}; change --sbatch, or ask those who run the cluster")
    return done.stdout.split()[-1]
