"""Install the oldest supported versions of all libraries into a new virtual environment, and run the tests there.

    python tests/oldest.py [FOLDER] [PYTEST OPTIONS ...]

The versions are the lower bounds in setup.cfg. FOLDER (default: .venv-oldest) is the virtual environment; it is reused.
"""

import configparser
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def oldest_versions() -> list[str]:
    """The requirements of setup.cfg with `>=` replaced by `==`, and upper bounds left out."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    return [re.sub(r">=([^,]+).*", r"==\1", requirement) for requirement in required]


def main(folder: str = ".venv-oldest", *options: str) -> int:
    """Create the environment, install, and run pytest; returns its exit status."""
    place = Path(folder).resolve()
    if not place.exists():
        venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    exact = oldest_versions()
    print("installing", *exact, flush=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *exact], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]", *exact], check=True)
    return subprocess.run([python, "-m", "pytest", "-q", *options], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
