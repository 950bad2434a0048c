"""Reports of scores that are no accuracy, confusion matrices, CSV and LaTeX tables, the DataFrame, and the worst mistakes."""

import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_report import PAGE, change, fail, records

from smallvit import __main__ as cli
from smallvit.packing import pack_floats
from smallvit.record import Record, read_record, write_records
from smallvit.report import csv_table, html, latex_table, markdown, text
from smallvit.report.answer import small_cnn
from smallvit.report.classes import CALIBRATION, CLASSES, CONFUSION
from smallvit.verdicts import compare
from smallvit.verdicts.score import score_named

pytestmark = pytest.mark.usefixtures("without_figures")
NAMES = ["benign", "malignant_1", "<other>"]
ARMS = {"vit": 0.0, "+SPT": 0.03, "pixels": -0.2}
RECIPE = """'''Does it help?'''
from functools import partial
from smallvit import PatchEmbed, Run, ShiftedPatchEmbed, ViT, ablate, accuracy, balanced_accuracy, calibration, digits
vit = partial(ViT, dim=16, depth=1, heads=2, tokenizer=partial(PatchEmbed, patch=2))
run = Run(data=digits, val=50, model=vit, steps=20, batch=16,
          evaluators=(balanced_accuracy, accuracy, calibration))
RUNS = ablate({"vit": run, "+SPT": run.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2))}, labels=[100], seeds=range(2))
"""


def scored(name: str, lower: bool = False, **fields) -> list[Record]:
    """Records judged by a score of this name, with a value for each of 300 test images and a confusion matrix."""
    draw, out = np.random.default_rng(0), []
    for r in records(ARMS, references=("pixels",)):
        if r.role == "reference":
            out.append(replace(r, score="linear_probe", test={"linear_probe": r.result}, preprocess={"classes": NAMES}))
            continue
        value = 3 * (1 - r.result) if lower else r.result
        values = draw.normal(value, 0.1, 300)
        values += value - values.mean()
        matrix = [[150 - r.seed, r.seed, 0], [5, 45, 0], [0, 10, 90]]
        bins = [[0, 0.0, 0.0]] * 12 + [[100, 0.83, 0.80], [100, 0.90, 0.85], [100, 0.97, 0.95]]
        extra = {"test": {name: value, "ece": 0.0333}, "val": {name: value}, "score": name, "lower_is_better": lower or None}
        extra |= {"contributions": pack_floats(values), "test_images": 300, "confusion": matrix, "reliability": bins}
        out.append(replace(r, **extra | {"preprocess": {"classes": NAMES}} | fields))
    return out


# Names and units


@pytest.mark.parametrize(
    ("name", "lower", "title", "number", "difference"),
    [
        ("accuracy", False, "accuracy", "12.34", "+12.34"),
        ("knn_20", False, "accuracy", "12.34", "+12.34"),
        ("balanced_accuracy", False, "balanced accuracy", "12.34", "+12.34"),
        ("macro_f1", False, "macro F1", "12.34", "+12.34"),
        ("auc", False, "AUC", "12.34", "+12.34"),
        ("log_loss", True, "log loss", "0.123", "+0.123"),
        ("ece", True, "ECE", "12.34", "+12.34"),
        ("my_error", True, "my error", "0.123", "+0.123"),
    ],
)
def test_scores_are_written_with_their_name_and_unit(name, lower, title, number, difference):
    score = score_named(name, lower)
    assert (score.title, score.number(0.1234), score.difference(0.1234)) == (title, number, difference)
    assert score.difference(-0.5).startswith("−") and score.direction == "; lower is better" * lower


def test_numbers_that_round_to_zero_have_no_minus_sign():
    for score, zero in ((score_named("accuracy", False), "0.00"), (score_named("log_loss", True), "0.000")):
        assert (score.number(-1e-6), score.difference(-1e-6), score.interval(-1e-6, 0.0)) == (zero, f"+{zero}", f"[{zero}, {zero}]")


def test_small_differences_of_a_loss_keep_a_digit():
    loss = score_named("log_loss", True)
    assert (loss.difference(-0.0004), loss.interval(-0.0004, 0.012)) == ("−0.0004", "[−0.0004, 0.012]")


def test_calibration_error_gets_no_verdict():
    """Chance makes it too large, by another amount for each arm: equal arms would often differ."""
    rows = [replace(r, score="ece", test={"ece": r.result}) for r in scored("log_loss", lower=True) if r.role != "reference"]
    row = next(row for row in compare(rows).rows if row.arm == "+SPT")
    assert (row.verdict, row.difference.low, row.difference.p) == ("no verdict", None, None)
    assert row.reason == "chance makes the ECE too large, and not equally for all arms, so no test of it is valid"


@pytest.mark.parametrize("page", [markdown, html])
def test_pages_name_the_score(page):
    found = page(scored("macro_f1"), **PAGE)
    assert "Test macro F1, % (mean ± SD over seeds)" in found and "points of test macro F1" in found
    assert not re.search(r"[Tt]est accuracy|Accuracy of every", found)
    assert "judged by linear_probe, and vit by macro_f1" in found.replace("\\_", "_")


@pytest.mark.figures
@pytest.mark.parametrize("page", [markdown, html])
def test_pages_say_that_a_lower_loss_is_better(page):
    found = page(scored("log_loss", lower=True), **PAGE)
    assert "Test log loss (mean ± SD over seeds; lower is better)" in found
    assert "“+SPT” (−0.09" in found and "is better than “vit”" in found
    assert "Left of the vertical line the arm is better" in found or page is markdown
    assert "towards 100%" not in found.replace("Accuracy axes are stretched towards 100%", "")
    assert re.search(r"70\.\d\d ± 0\.\d\d% \(SD, n = 8\)", found)  # the reference has its own unit


def test_a_plain_score_has_no_percent_sign_in_a_table_in_percent():
    """The baseline is judged by its accuracy, and a reference by its log loss; then the other way round."""
    rows = [replace(r, score="log_loss", test={"log_loss": 0.345}, lower_is_better=True) if r.role == "reference" else r for r in records(ARMS, references=("pixels",))]
    assert "| pixels | 0.345 ± 0.000 (SD, n = 8) " in markdown(rows, **PAGE)
    assert re.search(r"\| pixels \| \d\d\.\d\d ± \d\.\d\d% \(SD", markdown(scored("log_loss", lower=True), **PAGE))


def test_the_terminal_names_the_score():
    found = text(scored("log_loss", lower=True))
    assert "1,000 labels: test log loss, mean and SD over seeds; lower is better" in found
    assert re.search(r"\+SPT at 1,000 labels: better by 0\.0\d\d \[0\.0\d\d, 0\.\d\d\d\]", found) and "(linear_probe)" in found
    assert text(records(ARMS)).startswith("1,000 labels: test accuracy, mean and SD over seeds\n")


def test_a_failed_arm_does_not_hide_the_small_cnn():
    rows = [r for r in scored("log_loss", lower=True) if r.role != "reference"]
    rows += [replace(r, arm="small CNN", role="reference") for r in rows if r.arm == "vit"]
    failed = [replace(r, arm="+B") for r in rows if r.arm == "+SPT"]
    assert "a higher mean than the best arm" in (words := small_cnn(compare(rows)))
    assert small_cnn(compare(rows + fail(failed, "+B"))) == words


# Single classes


def test_classes_have_recall_precision_and_f1():
    page = markdown(scored("balanced_accuracy"), **PAGE)
    assert all(f"<summary>{heading}</summary>" in page for heading in (CLASSES, CONFUSION, CALIBRATION))
    assert "| benign | 150 | 97.67 | 96.70 | 97.18 |" in page  # 146.5 of 150 and of 151.5, means over seeds 0 to 7
    assert "| malignant_1 | 50 | 90.00 | 76.92 | 82.95 |" in page
    assert "| True class | predicted benign | predicted malignant_1 | predicted &lt;other&gt; |" in page
    assert "| benign | 146.5 | 3.5 | 0 |" in page and "| 93 to 100% | 100 | 97.00 | 95.00 |" in page


@pytest.mark.figures
def test_the_html_page_draws_matrices_and_diagrams():
    page = html(scored("balanced_accuracy"), **PAGE)
    for label in ("confusion matrix of each arm", "reliability diagram of each arm"):
        (svg,) = re.findall(rf'<svg role="img" aria-label="{label}".*?</svg>', page, re.DOTALL)
        assert not re.search(r"#0[a-d]0[a-d]0", svg)  # every color follows the light or dark page
    assert ">146.5<" in page and "&lt;other&gt;" in page and "<other>" not in page


@pytest.mark.slow
@pytest.mark.figures
def test_pages_escape_the_name_of_a_score():
    """The name comes from an evaluator, or from records that somebody else has made."""
    name = 'x"><u>|y'
    page, figures = markdown(scored(name), **PAGE), html(scored(name), **PAGE)
    assert "<u>" not in page and "<u>" not in figures
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    assert all(len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1 for lines in tables)


@pytest.mark.figures
def test_diagram_without_images_is_left_out():
    rows = [replace(r, reliability=[[0, 0.0, 0.0]] * 15) if r.arm == "+SPT" and r.reliability else r for r in scored("auc")]
    assert html(rows, **PAGE).count("reliability diagram of each arm") == 1
    empty = [replace(r, reliability=r.reliability and [[0, 0.0, 0.0]] * 15) for r in rows]
    assert "reliability diagram" not in html(empty, **PAGE) and CALIBRATION not in markdown(empty, **PAGE)


def test_records_without_these_fields_show_nothing_about_classes():
    page = markdown(records(ARMS), **PAGE)
    assert not any(heading in page for heading in (CLASSES, CONFUSION, CALIBRATION))
    rows = scored("balanced_accuracy")
    uncalibrated = [replace(r, test={"balanced_accuracy": r.result}) if r.role != "reference" else r for r in rows]
    page = markdown(uncalibrated, **PAGE)
    assert CONFUSION in page and CALIBRATION not in page


def test_a_large_confusion_matrix_is_left_out():
    classes = [f"c{i}" for i in range(40)]
    large = scored("auc", confusion=np.eye(40, dtype=int).tolist(), preprocess={"classes": classes})
    page = markdown(change(large, "pixels", preprocess={"classes": classes}), **PAGE)
    assert CONFUSION not in page and "| c39 | 1 | 100.00 | 100.00 | 100.00 |" in page


def test_files_that_were_left_out_are_counted():
    assert "3 image files could not be read and were left out." in markdown(scored("auc", skipped_files=3), **PAGE)
    assert "could not be read" not in markdown(scored("auc"), **PAGE)


# Tables


def test_the_csv_has_a_line_for_each_arm():
    comparison = compare(scored("log_loss", lower=True))
    lines = list(csv.DictReader(io.StringIO(csv_table(comparison))))
    assert [line["arm"] for line in lines] == list(ARMS)
    row, line = comparison.rows[1], lines[1]
    assert float(line["mean"]) == row.mean and float(line["difference"]) == row.difference.mean
    assert (float(line["low"]), float(line["high"])) == (row.difference.low, row.difference.high)
    assert (line["n"], line["verdict"], line["score"], line["lower_is_better"]) == ("8", "better", "log_loss", "True")
    assert lines[0]["difference"] == lines[2]["difference"] == "" and lines[2]["score"] == "linear_probe"
    missing = list(csv.DictReader(io.StringIO(csv_table(compare(fail(records(ARMS), "+SPT"))))))
    assert missing[1]["n"] == "0" and missing[1]["mean"] == "" and missing[1]["verdict"] == "no verdict"


def test_arm_that_begins_like_an_option_of_latex_does_not_belong_to_the_row_above():
    table = latex_table(compare(records({"vit": 0.0, "[A] x": 0.03, "*B": -0.03})))
    assert "\n{}[A] x & " in table and "\n{}*B & " in table


def test_the_latex_table_is_complete_and_escaped():
    arms = {"vit": 0.0, "+SPT & 50% of $x_i$": 0.03, "worse": -0.03}
    table = latex_table(compare(records(arms)))
    assert r"+SPT \& 50\% of \$x\_i\$ & \textbf{9" in table and table.count(r"\textbf") == 1
    assert table.count("\\\\\n") == 4 and all(line.count(" & ") == 4 for line in table.splitlines() if line.startswith("worse"))
    assert all(command in table for command in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{Test accuracy at 1,000 labels"))
    assert table.count("{") == table.count("}") and table.isascii()
    loss = latex_table(compare(scored("log_loss", lower=True)))
    assert "Log loss &" in loss and "(lower is better)" in loss and r"pixels (by linear\_probe)" in loss
    assert "standard deviation over 8 seeds." in table
    assert "standard deviation over 1 seed." in latex_table(compare(records(arms, seeds=1)))
    several = latex_table(compare(records(arms, labels=(100, 1000))))
    assert several.count(r"\multicolumn{5}{l}{\emph{") == 2 and several.count(r"\textbf") == 2


def test_records_become_a_data_frame(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    import smallvit

    rows = scored("auc")
    (tmp_path / "demo.py").write_text(RECIPE)
    write_records(tmp_path / "demo.jsonl", rows)
    frame = smallvit.records(tmp_path / "demo.py", out=tmp_path / "runs")
    assert len(frame) == len(rows) and set(frame["source"]) == {"committed"}
    means = frame.groupby("arm")["result"].mean()
    assert means["+SPT"] == pytest.approx(np.mean([r.result for r in rows if r.arm == "+SPT"]))
    assert {"arm", "labels", "seed", "score", "seconds", "test_auc", "test_ece", "val_auc", "tuned"} <= set(frame.columns)
    assert not {"contributions", "confusion", "run", "traceback"} & set(frame.columns)
    (tmp_path / "empty.py").write_text(RECIPE)
    with pytest.raises(ValueError, match=r"the recipe empty has no records.*smallvit run"):
        smallvit.records(tmp_path / "empty.py", out=tmp_path / "runs")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="install it with: pip install pandas"):
        smallvit.records(tmp_path / "demo.py")


# Commands


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a recipe whose runs have finished."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["run", "tiny.py", "--jobs", "2", "--only", "arm=vit,+SPT"]) in (0, 1)
    return folder


@pytest.mark.slow
def test_tables_and_mistakes_of_finished_runs(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    reads = Path("runs/tiny/test_reads.jsonl").read_bytes()
    cli.main(["report", "tiny.py", "--csv", "--latex", "paper.tex", "--mistakes", "+SPT", "--predictions", "+SPT"])
    printed = capsys.readouterr().out
    assert "table: runs/tiny/report.csv" in printed and Path("paper.tex").read_text().startswith("% \\usepackage{booktabs}")
    wrong, images, runs = map(int, re.search(r"Mistakes of \+SPT at 100 labels: (\d+) of (\d+) .* (\d+) runs", printed).groups())
    found = [read_record(path.parent) for path in Path("runs/tiny").rglob("record.json")]
    most = [round((1 - r.test["accuracy"]) * r.test_images) for r in found if r.arm == "+SPT"]
    assert runs == 2 and images == 500 and max(most) <= wrong <= sum(most)
    lines = [line for line in printed.splitlines() if line.lstrip().startswith("test image")]
    counts = [int(re.search(r"(\d) of 2", line)[1]) for line in lines]
    assert len(lines) == 20 and counts == sorted(counts, reverse=True) and counts[0] == 2
    table = list(csv.DictReader(Path("runs/tiny/predictions-SPT.csv").read_text().splitlines()))
    assert len(table) == 500 and {row["models"] for row in table} == {"2"}
    assert min(most) / 2 <= sum(row["class"] != row["label"] for row in table) <= wrong
    assert Path("runs/tiny/mistakes-SPT.png").read_bytes().startswith(b"\x89PNG")
    assert Path("runs/tiny/test_reads.jsonl").read_bytes() == reads  # looking at mistakes scores no setting


@pytest.mark.slow
def test_a_table_alone_is_printed(finished, monkeypatch, capfd):
    monkeypatch.chdir(finished)
    cli.main(["report", "tiny.py", "--csv", "-"])
    printed = capfd.readouterr()
    assert printed.out.startswith("recipe,arm,role") and len(list(csv.DictReader(io.StringIO(printed.out)))) == 5
    assert "report:" in printed.err


@pytest.mark.slow
def test_mistakes_need_a_known_arm_with_trained_models(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    for arm, message in (
        ("SPT", "the recipe tiny has no arm 'SPT'; expected one of 'vit', '+SPT'"),
        ("small CNN", "no finished run of 'small CNN' is in runs"),
    ):
        assert cli.main(["report", "tiny.py", "--mistakes", arm]) == 2
        assert message in capsys.readouterr().err
