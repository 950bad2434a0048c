"""One torch thread for each test process, and the data that the tests may read."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, also in child processes
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test asks no network, and waits for none

beside = Path(__file__).resolve().parents[2] / "shared" / "data"
if "SMALLVIT_DATA" not in os.environ and beside.exists():
    os.environ["SMALLVIT_DATA"] = str(beside)

import pytest  # noqa: E402

# torch is imported in the fixtures: with `-n`, the process that distributes the tests does not need it


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """torch computes in one thread, also if OMP_NUM_THREADS allows more."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def workdir(tmp_path, monkeypatch, request):
    """An empty working directory with one recipe, mine.py: the constant RECIPE of the test file."""
    from toys import write_recipe

    monkeypatch.chdir(tmp_path)
    write_recipe(request.module.RECIPE)
    yield tmp_path
    sys.modules.pop("recipes.mine", None)


@pytest.fixture
def without_figures(monkeypatch, request):
    """Leave the figures out of reports, except in tests with the mark `figures`. They take most of the time of a short run."""
    if request.node.get_closest_marker("figures") is None:
        from toys import leave_out_figures

        leave_out_figures(monkeypatch)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same state of torch's generator."""
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a traceback for each kind of device that is not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
