"""The wheel: all of it is there, and it works away from the clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the checkout and unpacked."""
    place = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout, so it is not known which files are the project's")
    for name in filter(lambda name: (ROOT / name).is_file(), files.stdout.splitlines()):
        (place / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "copy" / name).write_bytes((ROOT / name).read_bytes())
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(place / "copy")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    zipfile.ZipFile(next(place.glob("*.whl"))).extractall(place / "site")
    return place / "site"


def test_every_module_recipe_record_and_page_is_in_the_wheel(installed):
    ours = {path.relative_to(ROOT) for path in (ROOT / "smallvit").rglob("*") if path.suffix in (".py", ".html")}
    ours |= {Path("smallvit") / path.relative_to(ROOT) for path in (ROOT / "recipes").glob("*.*")}
    there = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert ours <= there, ours - there
    assert not any(path.parts[0] in ("recipes", "tests", "runs") for path in there)


def test_it_works_away_from_the_clone(installed, tmp_path):
    env = os.environ | {"PYTHONPATH": str(installed)}

    def smallvit(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "smallvit", *words], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert "quickstart" in smallvit("list").stdout
    done = smallvit("run", "recipes/quickstart.py", "--smoke", "--only", "arm=scratch,+LSA", "--jobs", "1")
    assert done.returncode == 0 and "+LSA" in done.stdout, done.stderr
    assert (tmp_path / "runs" / "smoke" / "quickstart" / "report.html").exists()
    record = next(tmp_path.rglob("record.json")).read_text()
    assert '"commit": null' in record, "a wheel took somebody's repository for its own"
