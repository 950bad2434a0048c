"""Ensembles: a folder whose runs differ in more than the seed is refused."""

import json
from functools import partial

import pytest
from PIL import Image
from toys import TINY_VIT

from smallvit import DINO, Run, SmallCNN, augment, fit, knn, load_all
from smallvit.__main__ import main
from smallvit.deploy.predict import finished_runs
from smallvit.record import CHECKSUM, RECORD

SHORT = Run(model=SmallCNN, labels=100, val=50, steps=2, batch=16)
OTHER = SHORT.vary(steps=3, lr=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with finished runs of one arm: two that differ in the seed, and one that differs also in two settings."""
    folder = tmp_path_factory.mktemp("arm")
    for run in (SHORT, SHORT.at_seed(1), OTHER):
        fit(run, folder / f"seed{run.seed}-{run.steps}")
    return folder


def test_folder_with_other_settings_makes_no_ensemble(folders, tmp_path, capsys):
    message = r"2 different settings.*seed0-2 and .*seed0-3, which differ in lr, steps; use RECIPE:ARM .* or name the folder of one run"
    with pytest.raises(ValueError, match=message):
        load_all(folders)
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    for options in (["--ensemble"], []):
        assert main(["predict", str(folders), str(tmp_path / "one.png"), *options]) == 2
        assert "2 different settings" in capsys.readouterr().err
    assert len(load_all([folders / "seed0-2", folders / "seed0-3"]).models) == 2, "a list of folders is the choice of the user"


def test_runs_that_differ_in_the_seed_of_pretraining_and_in_new_options_make_an_ensemble(tmp_path):
    """A run of an earlier version of smallvit does not name the options that were added later."""
    base = Run(model=TINY_VIT, labels=100, val=50, steps=1, batch=16)
    pretraining = base.vary(objective=partial(DINO, layers=1, prototypes=16), augment=augment.digit_crops(local=0), unlabelled=True,
                            clip=0.0, evaluators=(knn,))  # fmt: skip
    for seed in (0, 1):
        run = base.vary(init=pretraining).at_seed(seed)
        fit(run.init, tmp_path / f"pretraining{seed}")
        fit(run, tmp_path / "arm" / f"seed{seed}", init=tmp_path / f"pretraining{seed}")
    path = tmp_path / "arm" / "seed0" / RECORD
    plain = json.loads(path.read_text())
    del plain["run"]["optimizer"], plain[CHECKSUM]
    path.write_text(json.dumps(plain))
    assert [folder.name for folder in finished_runs(tmp_path / "arm")] == ["seed0", "seed1"]
