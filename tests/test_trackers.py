"""Trackers: what is sent to TensorBoard, W&B and MLflow, and that training and records do not depend on them."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toys import slow_after

from smallvit import trackers
from smallvit.record import read_records, write_record
from smallvit.trackers import CURVE, Follower, Tracker, TrackerProcess, check_tracker, followed, send

RECORDS = [r for r in read_records(Path(__file__).parents[1] / "recipes" / "quickstart.jsonl") if r.seed == 0][:3]


def stored(folder: Path, records=RECORDS) -> list[tuple[Path, object]]:
    """The records in folders of their own, as pairs (folder, record)."""
    pairs = [(folder / str(number), record) for number, record in enumerate(records)]
    for place, record in pairs:
        place.mkdir(parents=True)
        write_record(place, record)
    return pairs


class Memory(Tracker):
    """A tracker that keeps what it gets."""

    def begin(self, run):
        self.runs = getattr(self, "runs", {})
        self.runs[run.name] = {"points": [], "results": None, "status": None}
        return self.runs[run.name]

    def points(self, handle, values):
        handle["points"] += values

    def end(self, handle, results, status):
        handle |= {"results": results, "status": status}


def test_points_are_sent_as_they_come_and_results_at_the_end(tmp_path):
    place, record = tmp_path / "run", RECORDS[0]
    place.mkdir()
    follower = Follower(tracker := Memory(tmp_path, "demo"), "memory", followed([(place, record)]))
    follower.look()
    assert not hasattr(tracker, "runs")
    lines = [json.dumps({"step": 10 * k, "loss": 2.0 - k / 10, "val": None if k == 1 else k / 10}) for k in (1, 2, 3)]
    (place / CURVE).write_text(lines[0] + "\n" + lines[1][:9])  # the second line is being written
    follower.look()
    (sent,) = tracker.runs.values()
    assert sent["points"] == [(10, {"train/loss": 1.9})]
    (place / CURVE).write_text("\n".join(lines) + "\n")
    follower.look()
    assert sent["points"][1:] == [(20, {"train/loss": 1.8, "val/accuracy": 0.2}), (30, {"train/loss": 1.7, "val/accuracy": 0.3})]
    write_record(place, replace(record, curve=[[10, 1.9, None], [20, 1.8, 0.2], [30, 1.7, 0.3], [40, 1.6, 0.4]]))
    follower.look()
    assert [step for step, _ in sent["points"]] == [10, 20, 30, 40] and sent["status"] == "finished"
    assert sent["results"]["test/accuracy"] == record.test["accuracy"] and sent["results"]["cost/params"] == record.params
    assert sent["results"]["val/final_accuracy"] == record.val["accuracy"]
    assert not {*sent["results"]} & {name for _, curves in sent["points"] for name in curves}, "a result would be a point of a curve"
    follower.look()
    assert len(sent["points"]) == 4


def test_a_failed_run_is_sent_at_the_end_and_again_when_it_has_finished(tmp_path):
    ((place, record),) = stored(tmp_path, RECORDS[:1])
    write_record(place, replace(record, status="failed", error="too large", curve=None, test=None, correct=None))
    follower = Follower(tracker := Memory(tmp_path, "demo"), "memory", followed([(place, record)]))
    follower.look()
    assert not hasattr(tracker, "runs"), "it could be trained again now"
    follower.look(last=True)
    assert [sent["status"] for sent in tracker.runs.values()] == ["failed"] and not follower.done
    write_record(place, record)
    follower = Follower(tracker, "memory", followed([(place, record)]))
    follower.look()
    assert [sent["status"] for sent in tracker.runs.values()] == ["finished"] and follower.done == {record.fingerprint}


def test_a_run_is_sent_once_even_by_another_process(tmp_path):
    pairs = stored(tmp_path)
    first, second = (Follower(Memory(tmp_path, "demo"), "memory", followed(pairs)) for _ in range(2))
    first.look()
    assert len(first.tracker.runs) == 3 and not first.waiting
    again = Follower(Memory(tmp_path, "demo"), "memory", followed(pairs))
    again.look()
    assert not hasattr(again.tracker, "runs") and len(second.waiting) == 3


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_results_arrive_at_the_real_tracker(name, tmp_path, monkeypatch):
    pytest.importorskip(trackers.TRACKERS[name][1])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    runs, record = followed(stored(tmp_path / "runs")), RECORDS[0]
    assert send(name, tmp_path, "demo", runs) == 3 and send(name, tmp_path, "demo", runs) == 0
    accuracy, steps = record.test["accuracy"], [step for step, _, _ in record.curve]
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray

        (folder,) = {path.parent for path in tmp_path.glob(f"tensorboard/{record.arm}/*/*/events*")}
        events = EventAccumulator(str(folder), {"tensors": 0}).Reload()  # 0: all points
        assert [event.step for event in events.Tensors("train/loss")] == steps
        assert make_ndarray(events.Tensors("test/accuracy")[0].tensor_proto) == pytest.approx(accuracy)
    elif name == "wandb":
        assert len([*tmp_path.glob("wandb/offline-run-*")]) == 3
    else:
        from mlflow import MlflowClient

        client = MlflowClient()
        found = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
        (run,) = (run for run in found if run.data.tags["fingerprint"] == record.fingerprint)
        assert run.data.metrics["test/accuracy"] == pytest.approx(accuracy) and run.info.status == "FINISHED"
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == steps


def test_names_that_mlflow_refuses_are_changed():
    class Client:
        def log_metric(self, handle, name, value):
            if not re.fullmatch(r"[/\w.\- :]*", name):
                raise ValueError(name)
            names.append(name)

        def set_terminated(self, handle, status):
            names.append(status)

    names, tracker = [], trackers.MLflow(Path(), "demo")
    tracker.client = Client()
    tracker.end(None, {"test/recall (spruce)": 0.5, "test/knn@5": 0.5, "test/Fläche: a-b.c": 0.5}, "finished")
    assert names == ["test/recall _spruce_", "test/knn at 5", "test/Fläche: a-b.c", "FINISHED"]


def broken(folder: Path, body: str) -> str:
    """Write a package `tensorboard` whose writer does `body`, and return the folder for the search path of Python."""
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "__init__.py").write_text("")
    (folder / "tensorboard" / "summary.py").write_text(f"def Writer(folder):\n    {body}\n")
    return str(folder)


@pytest.mark.parametrize(
    "body",
    slow_after(1, ["raise ConnectionError('no server')", "import time; time.sleep(600)", "import os; os._exit(3)"]),
    ids=["fails", "stalls", "crashes"],
)
def test_a_tracker_that_does_not_work_ends_with_a_note(body, tmp_path, monkeypatch, capfd):
    pairs = stored(tmp_path / "runs")
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path / "path", body))
    monkeypatch.setattr(trackers, "check_tracker", lambda name: None)
    process = TrackerProcess("tensorboard", tmp_path, "demo", followed(pairs))
    process.close(patience=2.0 if "sleep" in body else 8.0)
    assert process.process.poll() is not None
    error = capfd.readouterr().err
    assert "note: tensorboard did not get all results; the records are complete" in error and "smallvit report --log" in error
    assert ("training goes on without it (ConnectionError: no server)" in error) == ("raise" in body)


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="--log is 'excel'; expected one of tensorboard, wandb, mlflow"):
        check_tracker("excel")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'smallvit\[wandb\]'"):
        check_tracker("wandb")
