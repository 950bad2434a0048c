"""The wheel contains every file that smallvit needs, and works outside the clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of an unpacked wheel, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    if files.returncode:
        pytest.skip("needs a git checkout, to know which files belong to the project")
    for name in filter(lambda name: (ROOT / name).is_file(), files.stdout.splitlines()):
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(folder / "copy")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_wheel_contains_every_module_recipe_record_and_page(installed):
    needed = {path.relative_to(ROOT) for path in (ROOT / "smallvit").rglob("*") if path.suffix in (".py", ".html", ".typed")}
    needed |= {Path("smallvit") / path.relative_to(ROOT) for path in (ROOT / "recipes").glob("*.*")}
    contained = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert needed <= contained, needed - contained
    assert not any(path.parts[0] in ("recipes", "tests", "runs") for path in contained)


@pytest.mark.slow
def test_installed_package_works_outside_the_clone(installed, tmp_path):
    env = os.environ | {"PYTHONPATH": str(installed)}

    def smallvit(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "smallvit", *words], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert "quickstart" in smallvit("list").stdout
    done = smallvit("run", "recipes/quickstart.py", "--smoke", "--only", "arm=scratch,+LSA", "--jobs", "1")
    assert done.returncode == 0 and "+LSA" in done.stdout, done.stderr
    assert (tmp_path / "runs" / "smoke" / "quickstart" / "report.html").exists()
    record = next(tmp_path.rglob("record.json")).read_text()
    assert '"commit": null' in record, "the wheel reported the commit of another repository"
