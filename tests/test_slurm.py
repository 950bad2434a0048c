"""Submitting a recipe to SLURM: what its scripts say and do. The tests in tests/cluster do the same with a real SLURM."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smallvit.__main__ import main, parser
from smallvit.commands.run import EXCLUDED, NEEDED
from smallvit.launch import slurm
from smallvit.launch.results import folder, tags
from smallvit.launch.shards import divide
from smallvit.recipe import load_recipe
from smallvit.train import fit

RECIPE = '''
"""Does locality attention help a very small model?"""
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, augment

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, val=20,
              augment=augment.digits())
RUNS = ablate({"scratch": scratch, "+LSA": scratch.vary(attention=LocalityAttention)}, labels=[20], seeds=range(2),
              references=False)
'''
SUBMIT = ("run", "mine.py", "--on", "slurm", "--jobs", "4")


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def calls(workdir, monkeypatch) -> Path:
    """A file to which a stand-in for sbatch appends its arguments, one line for each call. It numbers the jobs 7, 8, ..."""
    path = workdir / "calls.txt"
    write_program(workdir / "bin/sbatch", f'echo "$* ${{SLURM_CPUS_PER_TASK-}}" >> {path}; echo $((6 + $(wc -l < {path})))')
    monkeypatch.setenv("PATH", f"{workdir / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "99")  # of the job inside which the command is typed
    return path


def scripts(folder: Path = Path("runs/mine/slurm")) -> tuple[str, str]:
    return (folder / "array.sh").read_text(), (folder / "report.sh").read_text()


def directives(script: str) -> list[str]:
    """The options of all #SBATCH lines, as sbatch splits them."""
    return [word for line in script.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]


def test_an_array_of_shards_and_a_report_that_waits_for_it_are_submitted(calls, capsys):
    assert main([*SUBMIT, "--sbatch", "-p gpu --gres=gpu:1 -t 60", "--only", "arm=scratch,+LSA", "seed=0-1"]) == 0
    folder = Path("runs/mine/slurm").absolute()
    assert calls.read_text().splitlines() == [
        f"--parsable {folder}/array.sh ",
        f"--parsable --dependency=afterany:7 {folder}/report.sh ",
    ], "the variables of the surrounding job are not those of the new ones"
    array, report = scripts()
    assert {"--array=1-4", "-p", "gpu", "--gres=gpu:1", "-t", "60", "--requeue"} <= set(directives(array))
    assert directives(report)[-4:] == ["-p", "gpu", "-t", "60"] and "--gres=gpu:1" not in directives(report)
    assert "smallvit report mine.py --out runs" in report
    shown = capsys.readouterr().out
    assert "4 jobs (7)" in shown and "scancel 7 8" in shown and "smallvit status mine.py" in shown


def test_dry_run_prints_both_scripts_and_submits_nothing(calls, capsys):
    assert main([*SUBMIT, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --array=1-4" in shown and "smallvit report mine.py" in shown and "afterany" in shown
    assert not calls.exists() and not Path("runs").exists()


def test_options_of_sbatch_can_be_given_several_times(calls):
    main([*SUBMIT, "--sbatch", "-p gpu", "--sbatch=--requeue", "--sbatch", "-t 60"])
    assert directives(scripts()[0])[-5:] == ["-p", "gpu", "--requeue", "-t", "60"]


@pytest.mark.parametrize("given, ours", [
    ("-o mine-%a.txt", "--output"),
    ("--output=mine.txt", "--output"),
    ("-J mine", "--job-name"),
    ("--no-requeue", "--requeue"),
    ("--requeue", "--requeue"),
    ("--signal=B:USR2@300", "--signal"),
    ("--signal B:10", "--signal"),
    ("-N1", "--nodes"),
    ("--open-mode=truncate", "--open-mode"),
])  # fmt: skip
def test_an_option_of_the_user_replaces_ours(calls, given, ours):
    main([*SUBMIT, "--sbatch", given])
    found = directives(scripts()[0])
    names = [word.partition("=")[0] for word in found]
    assert names.count(ours) == ("=" in given and given.startswith(ours)) + (given in (ours, "--signal B:10"))
    assert " ".join(shlex.split(given)).replace("-N1", "-N 1") in " ".join(found)
    others = {"--array", "--job-name", "--nodes", "--output", "--open-mode", "--requeue", "--signal"} - {ours}
    assert others <= set(names) and all(names.count(name) == 1 for name in others)
    assert f"' {'USR2' if 'USR2' in given else 'USR1'}\n" in scripts()[0]


@pytest.mark.parametrize("words, key_words", [
    (["--sbatch", "--array=1-9"], "array --jobs"),
    (["--sbatch", "-a 1-9"], "array --jobs"),
    (["--sbatch", "--wrap 'echo'"], "wrap"),
    (["--sbatch", "-N 2"], "2 nodes expected 1"),
    (["--sbatch", "--signal=USR1@60"], "B:USR1@SECONDS"),
    (["--sbatch", "--signal=B:TERM@60"], "B:USR1@SECONDS"),
    (["--sbatch", "gpu"], "'gpu' is no option"),
    (["--sbatch", "-p gpu 60"], "'60' is no option"),
    (["--sbatch", "-p 'gpu"], "close the quotes"),
    (["--device", "gpu"], "'gpu' cpu, cuda or auto"),
    (["--device", "mps"], "'mps' cpu, cuda or auto"),
    (["--jobs", "100001"], "--jobs is 100001 at most 100,000"),
    (["--stack", "2", "--numerics", "compiled=yes"], "2 runs compiled"),
    (["--fast"], "--fast --stack"),
    (["--smoke"], "--smoke without --on slurm"),
    (["--until-decided"], "--until-decided"),
    (["--shard", "1/2"], "--shard"),
    (["--log", "wandb"], "--log --on slurm report"),
    (["--max-seeds", "8"], "--max-seeds --until-decided"),
    (["--address", "local"], "--address --on ray"),
])  # fmt: skip
def test_options_that_do_not_suit_are_refused_before_anything_is_submitted(calls, capsys, words, key_words):
    assert main([*SUBMIT, *words]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in key_words.split()), message
    assert not calls.exists()


def test_number_of_jobs_is_required(calls, capsys):
    assert main(["run", "mine.py", "--on", "slurm"]) == 2
    assert "--jobs N" in capsys.readouterr().err


def test_every_option_of_run_is_passed_on_or_refused_or_used_here():
    (commands,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    flags = {flag for action in commands.choices["run"]._actions for flag in action.option_strings if flag.startswith("--")}
    refused = [other for first, other in EXCLUDED if first == "--on slurm"]
    refused += [flag for flag, others in NEEDED.items() if "--on slurm" not in others]
    handled = [*slurm.PASSED_ON, *refused, *slurm.HERE]
    assert flags - {"--help"} == set(handled) and len(handled) == len(set(handled))


def test_only_shards_with_runs_to_train_get_a_job(workdir, calls, capsys):
    shards = divide(load_recipe("mine.py").RUNS, [], 4)

    def train(*numbers: int):
        for entry in (entry for number in numbers for entry in shards[number - 1]):
            fit(entry.run, folder(entry, "runs", "mine"), tags=tags(entry, "mine"))

    train(2)
    assert main([*SUBMIT]) == 0
    array = scripts()[0]
    assert "--array=1,3-4" in directives(array) and '--shard "$SLURM_ARRAY_TASK_ID/4"' in array
    assert "3 jobs (7) for 3 runs" in capsys.readouterr().out
    calls.unlink()
    train(1, 3, 4)
    assert main([*SUBMIT]) == 0
    assert "nothing to submit" in capsys.readouterr().out and not calls.exists()


@pytest.mark.parametrize("numbers, text", [([1], "1"), ([1, 2], "1-2"), ([2, 3, 4, 7, 9, 10], "2-4,7,9-10")])
def test_numbers_of_shards_are_written_as_ranges(numbers, text):
    assert slurm.ranges(numbers) == text


def test_missing_sbatch_is_an_error_that_says_what_to_do(workdir, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(workdir))
    assert main([*SUBMIT]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in ("sbatch cannot be started", "login node", "--dry-run"))


def test_what_sbatch_said_is_in_the_error(calls, capsys):
    write_program(Path("bin/sbatch"), 'echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1')
    assert main([*SUBMIT, "--sbatch", "-p gpu"]) == 2
    message = capsys.readouterr().err
    assert "sbatch refused" in message and "invalid partition specified: gpu" in message and "Traceback" not in message


def test_refused_report_names_the_jobs_that_were_submitted(calls, capsys):
    write_program(Path("bin/sbatch"), '[[ "$*" == *afterany* ]] && { echo "sbatch: error: no GPU asked for" >&2; exit 1; }; echo "7;c2"')
    assert main([*SUBMIT]) == 2
    message = capsys.readouterr().err
    assert "no GPU asked for" in message and "smallvit report mine.py" in message and "scancel -M c2 7" in message


# What the script of a job does, with stand-ins for Python and scontrol


def run_script(monkeypatch, training: str, *words: str, **variables: str) -> subprocess.Popen:
    """Start the script of the jobs in bash as SLURM does, in another folder. `training` is what the training does."""
    write_program(Path("bin/python"), f'printf "%s\\n" "$@" > "$RESULT/words.txt"; pwd > "$RESULT/pwd.txt"\n{training}')
    write_program(Path("bin/scontrol"), 'echo "$*" > "$RESULT/scontrol.txt"; kill -TERM $PPID')
    monkeypatch.setattr(sys, "executable", str(Path("bin/python").absolute()))
    monkeypatch.setenv("SMALLVIT_DATA", "/some where/$HOME")
    main([*SUBMIT, *words, "--dry-run"])
    array = next(Path().rglob("array.sh"), None)
    assert array is None, "a dry run writes nothing"
    main([*SUBMIT, *words])
    array = next(Path().rglob("array.sh"))
    environment = {"PATH": os.environ["PATH"], "RESULT": os.getcwd(), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    job = environment | {"SLURM_CPUS_ON_NODE": "2"} | variables
    return subprocess.Popen(["bash", str(array.absolute())], cwd="/", env=job, stderr=subprocess.PIPE, text=True)


def test_job_trains_its_shard_with_the_options_folder_and_data_of_the_command_line(calls, monkeypatch):
    out = "it's 100% $HOME; a \"folder\""
    options = ["--out", out, "--stack", "2", "--numerics", "precision=fp32", "--only", "arm=+LSA", "seed=0-1", "--retry"]
    job = run_script(monkeypatch, 'echo "$SMALLVIT_DATA" > "$RESULT/data.txt"', *options, "--scale-steps", "3")
    assert job.wait(60) == 0
    words = Path("words.txt").read_text().splitlines()
    wanted = ["-m", "smallvit", "run", "mine.py", "--out", out, "--scale-steps", "3", "--device", "cpu", "--stack", "2"]
    assert words[: len(wanted)] == wanted and words[-4:] == ["--shard", "3/4", "--jobs", "2"]
    assert words[len(wanted) : -4] == ["--numerics", "precision=fp32", "--only", "arm=+LSA", "seed=0-1", "--retry"]
    assert Path("pwd.txt").read_text().strip() == os.getcwd() and Path("data.txt").read_text() == "/some where/$HOME\n"
    assert parser().parse_args(words[2:]).shard == (3, 4)


@pytest.mark.parametrize("status, requeued", [(0, False), (1, False), (2, False), (130, False), (137, True), (slurm.BUSY, True)])
def test_job_is_started_again_if_its_training_was_killed_or_must_wait(calls, monkeypatch, status, requeued):
    job = run_script(monkeypatch, f"exit {status}")
    assert job.wait(60) == (-signal.SIGTERM if requeued else status)
    assert Path("scontrol.txt").exists() == requeued
    assert not requeued or Path("scontrol.txt").read_text() == "requeue 7_3\n"


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_after_the_warning_the_training_is_stopped_and_the_job_is_started_again(calls, monkeypatch, name):
    training = 'trap "echo stopped > $RESULT/stopped.txt; exit 130" TERM; touch $RESULT/began.txt; sleep 60 & wait'
    job = run_script(monkeypatch, training, "--sbatch", f"--signal=B:{name}@60")
    while not Path("began.txt").exists() and job.poll() is None:
        time.sleep(0.01)
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert job.wait(60) == -signal.SIGTERM, "scontrol ends the script, so that it does not exit by itself"
    assert Path("stopped.txt").exists() and Path("scontrol.txt").read_text() == "requeue 7_3\n"


@pytest.mark.parametrize("file, age, saved", [
    ("checkpoint.pt", "now", True),
    ("model.safetensors", "now", True),
    ("checkpoint.pt", "-1hour", False),
    ("record.json", "now", False),
])  # fmt: skip
def test_job_without_progress_is_not_started_again_for_ever(calls, monkeypatch, file, age, saved):
    """The record of a run that is out of memory is written again at each try, which is no progress."""
    place = Path("runs/mine/20/scratch/seed0")
    training = f"mkdir -p {place}; touch -d {age} {place}/{file}; kill -KILL $$"
    job = run_script(monkeypatch, training, SLURM_RESTART_COUNT=str(slurm.MOST_RESTARTS))
    assert job.wait(60) == (-signal.SIGTERM if saved else 1) and Path("scontrol.txt").exists() == saved
    assert job.stderr is not None
    text = job.stderr.read()
    assert bool(re.search(r"started again 10 times.*longer time limit", text)) != saved


def test_refused_requeue_does_not_count_as_success(calls, monkeypatch):
    job = run_script(monkeypatch, "rm $RESULT/bin/scontrol; exit 137", PATH=f"{Path('bin').absolute()}:/usr/bin:/bin")
    assert job.wait(60) != 0
