"""Records: one JSON file for each run, with its settings, its results and what produced them.

The folder of a run holds `record.json`, `model.safetensors` (the weights that were evaluated) and, until the run has ended,
`checkpoint.pt`. Every file is written under a temporary name and then moved into place, so a kill or a full disk never
damages an existing file. `<recipe>.jsonl` holds all records of a recipe, one per line.

A record holds the hash of its own content and of its weights. Both are checked before they are used, so a single flipped bit is
found. Records may come from anywhere: what `parse` returns has the shapes of `shapes.py` and is safe to print.
"""

import functools
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallvit.packing import unpack_bits, unpack_floats
from smallvit.shapes import all_printable, printable, problem
from smallvit.storage import check_size, file_sha256, parse_json, read_bounded, write_text
from smallvit.words import how_many

if TYPE_CHECKING:
    import numpy as np

RECORD, WEIGHTS, CHECKPOINT, CURVE = "record.json", "model.safetensors", "checkpoint.pt", "curve.jsonl"  # in a run's folder
FORMAT = 2  # of a record; raised when the meaning of a field changes
CHECKSUM = "checksum"  # in the JSON of a record: the hash of all other fields
MOST_BYTES = 2**26  # of one record; a file with all records of a recipe may have 16 times as many
MOST_WEIGHTS = 2**36  # bytes of a file of weights
LONGEST_NAME = 100  # characters of an arm in the name of its folder
RANDOM = "random initialization"  # the reference arm that probes an untrained model

ROLES = ("baseline", "technique", "reference", "dependency")
STATUSES = ("finished", "failed", "unavailable", "interrupted", "missing")
RETRIED = ("unavailable", "interrupted")  # no fault of the run: the same command trains it again


@dataclass(kw_only=True)
class Record:
    """The record (saved results) of one run: its settings, results and costs, and the machine and software that were used. A
    field is None if it does not apply or was not measured.

    Raises ValueError when a value has the wrong type, or when the role or the status is unknown.
    """

    # What ran, and its place in the comparison
    recipe: str  # name of the recipe
    arm: str  # name of the arm
    role: str  # "baseline", "technique", "reference", or "dependency" (trained only because another run needs it)
    baseline: str = ""  # the arm it is compared with; "" if the recipe has only one baseline
    labels: int | None  # number of labelled images; None for all
    seed: int  # random seed
    length: int | None = None  # training steps of the baseline, in a comparison over several training lengths
    tuning: dict | None = None  # how the settings of the run were chosen, and what the trials cost; None: not tuned
    looks: list | None = None  # numbers of seeds at which the comparison is tested; None: once, with all seeds
    removed: int | None = None  # comparisons that were run and that the recipe no longer contains; they count for Holm
    unused_seeds: list | None = None  # seeds with which this arm was also trained, and which the recipe does not list
    fingerprint: str  # hash of `run`: equal for equal settings
    run: dict  # all settings, as `describe` writes them
    status: str  # "finished", "failed", "unavailable" (no weights), "interrupted" (full disk or the like) or "missing" (no run)
    error: str | None = None  # why it failed, was interrupted or is unavailable
    traceback: str | None = None  # the full Python traceback of a failed run
    superseded: str | None = None  # why the recipe no longer contains this run, in a committed record
    format: int = FORMAT  # version of this list of fields

    # Results
    score: str | None = None  # name of the number in `test` that the arm is judged by
    val: dict | None = None  # results on the validation images, name -> number
    val_images: int | None = None  # number of validation images
    test: dict | None = None  # results on the test images, name -> number
    probes: list | None = None  # names in `test` that come from probes of frozen features
    lower_is_better: bool | None = None  # whether a lower score is better, as for a loss; None: a higher one is
    correct: str | None = None  # which test images (or, without `test`, validation images) are right, if it is known
    contributions: str | None = None  # one number for each of these images whose mean is the score, if it is no accuracy
    confusion: list | None = None  # number of test images by true class (rows) and predicted class (columns)
    reliability: list | None = None  # [images, mean confidence, accuracy] in each of 15 equal bins of the confidence
    test_reads: int | None = None  # how often this run read the test images
    test_settings: int | None = None  # how many settings of this arm had been scored on these test images, when last counted
    test_images: int | None = None  # number of test images
    test_majority: float | None = None  # share of the most frequent class in the test images
    test_repeats: int | None = None  # test images that are also training or validation images, pixel by pixel
    folds: int | None = None  # number of folds of the cross-validation; the seed is then folds x pass + fold
    pool_images: int | None = None  # number of images that are split into folds
    test_index: str | None = None  # which of these the run tested, as `pack_bits` writes them
    test_groups: list | None = None  # number of the group, such as a patient, of each test image
    chosen_on_val: dict | None = None  # what was chosen on validation images, and how many labels that used
    curve: list | None = None  # [step, mean training loss, validation accuracy] at each check
    health: list | None = None  # collapse statistics at each check, for runs without labels
    picture: dict | None = None  # what a token reduction did to the patches of three images

    # Costs
    params: int | None = None  # number of parameters
    macs: int | float | None = None  # multiply-adds of one forward pass on one image
    tokens: int | None = None  # tokens that enter the first block
    patches: int | None = None  # tokens among them that are patches, without class token and registers
    images_seen: int | None = None  # training steps x images in a step, also those without labels, x passes of the optimizer
    unlabelled: int | None = None  # number of images used without their labels
    steps: int | None = None  # optimizer steps taken
    seconds: float | int | None = None  # training time
    pretraining: dict | None = None  # the same costs, summed over the runs that had to be trained first

    # Model and data
    preprocess: dict | None = None  # how an image becomes model input: size, channels, mean, std, classes
    init_weights: dict | None = None  # which external or earlier weights were loaded
    weights_sha256: str | None = None  # hash of model.safetensors
    subset_sha256: str | None = None  # hash of the indices of the labelled images
    drawn_share: float | int | None = None  # share of a class's training images that are labelled; the largest over classes
    trace: dict | None = None  # hashes and numbers that `smallvit verify` compares: see `train/trace.py`
    data_sha256: str | None = None  # hash of all pixels and labels of the data set
    skipped_files: int | None = None  # image files that could not be read and were left out

    # Machine and software
    device: str | None = None  # "cpu", or the name of the GPU
    cpu: str | None = None  # name of the processor, with its family and model (without these before version 0.3.0)
    threads: int | None = None  # torch threads
    precision: str | None = None  # "fp32" or "bf16"
    kernel: str | None = None  # as chosen: "rule", "explicit", "fused" (attention) or "native" (all blocks that it can compute)
    evaluated: str | None = None  # the kernel with which the model was evaluated at the end: "rule" or "native"
    compiled: bool | None = None  # whether blocks were compiled
    stacked: int | None = None  # how many runs were trained together as one model
    processes: int | None = None  # how many processes trained the run together at its end (`fit_parallel`); None: one
    code: dict | None = None  # hash of the library's files, git commit, whether files differ from it
    versions: dict | None = None  # versions of Python and of the main libraries

    def __post_init__(self):
        for name, allowed in TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
                raise ValueError(f"{name} is {value!r:.80}; expected {expected}")
        for name, allowed in (("role", ROLES), ("status", STATUSES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(repr, allowed))}")

    def has_other_data(self, sha256: str, classes: Sequence[str]) -> bool:
        """Return whether the run was trained on other images, labels or names of classes than those of a data set, which has
        the hash `sha256` and these `classes`. An old record does not keep the hash or the names; what is missing is not
        compared. Names are compared as they are printed, because that is how they are read from a file.
        """
        names = (self.preprocess or {}).get("classes") or classes
        return self.data_sha256 not in (None, sha256) or [*map(printable, names)] != [*map(printable, classes)]

    def has_other_weights(self, sha256: str | None) -> bool:
        """Return whether the run began with another file of pretrained weights than that with the hash `sha256`. The result is
        False for the hash None, of a file that is not on this machine, and for a run that loaded no weights.
        """
        return sha256 is not None and (self.init_weights or {}).get("sha256", sha256) != sha256

    @property
    def finished(self) -> bool:
        """Whether the run has ended without an error, so that its model is trained and evaluated."""
        return self.status == "finished"

    @property
    def result(self) -> float:
        """The number by which the run is judged, such as its accuracy on the test images. Raises ValueError if there is no such
        number. It lies between 0 and 1. A score whose lower values are better, such as a loss, is only required to be finite
        and at least 0.
        """
        return self._score("test")

    @property
    def val_result(self) -> float:
        """The number by which the run is judged, measured on the validation images. Raises ValueError if there is no such
        number. It lies between 0 and 1. A score whose lower values are better, such as a loss, is only required to be finite
        and at least 0.
        """
        return self._score("val")

    @property
    def correct_bits(self) -> "np.ndarray | None":
        """Which test images were classified correctly, as a boolean array with one entry for each test image, in the order of
        the test set. None if the record (the results of a run) does not say it.

        For a run that reads no test images (`test` is None), the entries are those of the validation images.

        Raises ValueError, with the name of the run, if `correct` does not agree with the number of images or with the score.
        """
        return self._unpacked("correct", unpack_bits)

    @property
    def per_image(self) -> "np.ndarray | None":
        """One number for each test image, in the order of the test set, as an array of floats. Their mean is the number by
        which the run is judged. For an accuracy they are 1 for right and 0 for wrong. None if the record (the results of a run)
        has no such numbers.

        For a run that reads no test images (`test` is None), the entries are those of the validation images.

        Raises ValueError, with the name of the run, if the numbers do not agree with the number of images or with the score.
        """
        if self.contributions is not None:
            return self._unpacked("contributions", unpack_floats)
        bits = self.correct_bits
        return None if bits is None else bits.astype(float)

    def check_scores(self):
        """Raise ValueError if the numbers of a finished run contradict each other: if the number that judges it is missing or
        is no possible score, or does not agree with the values of the single images.
        """
        if self.finished and self.score is not None and (self.test or self.val):
            self.per_image  # noqa: B018  raises an error
            _ = self.result if self.test else self.val_result

    def _unpacked(self, name: str, unpack: Callable[[str, int], "np.ndarray"]) -> "np.ndarray | None":
        """Return the values of all images in the field `name`, which the function `unpack` reads from text, or None if the
        field is None. Raise ValueError if they do not agree with the number of images or with the score of the run.
        """
        text = getattr(self, name)
        if text is None:
            return None
        if self.test is None:
            images, count, value = "validation", self.val_images, self.val_result
        else:
            images, count, value = "test", self.test_images, self.result
        run = f"{self.arm!r}, seed {self.seed}"
        try:
            values = unpack(text, count or 0)
        except ValueError as error:
            raise ValueError(f"{run}: {name} does not fit {count} {images} images: {error}; train it again") from error
        if name == "correct" and self.contributions is not None:  # the score is no accuracy
            return values
        mean, rounding = float(values.mean()), 1e-9 if name == "correct" else 1e-6 * max(1.0, float(abs(values).max()))
        if abs(mean - value) > rounding:
            found = f"{mean:.6f} of the {count} {images} images are right in correct"
            if name != "correct":
                found = f"the mean of {name} over the {count} {images} images is {mean:.6f}"
            raise ValueError(f"{run}: {found}, but {self.score} is {value:.6f}; expected the same number; train it again")
        return values

    def _score(self, images: str) -> float:
        """Return the number by which the run is judged, on the test images ("test") or on the validation images ("val"). Raise
        ValueError if there is no such number, if it is negative or infinite, or if a score that should be high is above 1.
        """
        value, limit = (getattr(self, images) or {}).get(self.score), math.inf if self.lower_is_better else 1
        if not isinstance(value, int | float) or not 0 <= value <= limit or value == math.inf:
            allowed = "that is finite and at least 0" if self.lower_is_better else "between 0 and 1"
            raise ValueError(f"{self.arm!r}, seed {self.seed}: {images} has no {self.score!r} {allowed}; train it again")
        return value


def allowed_types(hint: Any) -> tuple[type, ...]:
    """Return the classes that a type hint allows, as a tuple: `int | None` gives (int, NoneType)."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


TYPES = {name: allowed_types(hint) for name, hint in typing.get_type_hints(Record).items()}
NEEDED = ("recipe", "arm", "role", "labels", "seed", "status", "fingerprint", "run")


def write_record(folder: Path, record: Record):
    """Write the record (results) of a run to the file `record.json` in the folder of the run."""
    write_text(Path(folder) / RECORD, to_json(record, indent=1) + "\n")


def recorded_folders(place: Path) -> list[Path]:
    """Return the folders of the runs of a recipe that have a record, sorted. `place` is the folder of all its runs."""
    folders = [path.parent for path in sorted(place.rglob(RECORD))]
    # not deeper: the folder of a recipe called "explore" or "tuning" also holds the folders of other recipes
    return [folder for folder in folders if len(folder.relative_to(place).parts) <= 3]


def arm_folder(arm: str, role: str) -> str:
    """Return the name of the folder with the runs of an arm (variant), in which other characters than letters, digits, "+", "-"
    and "." are replaced. Runs with the role "dependency" lie in `dependencies`, because different comparisons may give them
    different names.
    """
    plain = re.sub(r"[^A-Za-z0-9+.-]+", "-", arm)[:LONGEST_NAME].strip("-.") or "arm"
    return "dependencies" if role == "dependency" else plain


def run_folder(seed: int, fingerprint: str) -> str:
    """Return the name of the folder of a run, such as `seed0-1a2b3c4d`: its seed and the hash of its settings, shortened."""
    return f"seed{seed}-{fingerprint[:8]}"


def without_copies(found: Iterable[tuple[Path, Record]]) -> tuple[list[tuple[Path, Record]], str]:
    """Return one record for each run of each arm (variant), and a note that names two folders with records of the same run, for
    example after a folder was copied from another machine. `found` are pairs of a folder and the record in it, and so is the
    result. The note is empty if there is no such run.

    The record that is used is that of the folder in which `smallvit run` stores the run, if there is one.
    """
    places: dict[tuple, list[tuple[Path, Record]]] = {}
    for place, record in found:
        places.setdefault((record.fingerprint, record.arm, record.role, record.labels), []).append((place, record))

    def has_other_name(pair: tuple[Path, Record]) -> tuple[bool, bool]:
        place, record = pair
        is_renamed = place.name != run_folder(record.seed, record.fingerprint)
        return is_renamed, place.parent.name != arm_folder(record.arm, record.role)

    kept = [min(each, key=has_other_name) for each in places.values()]
    several = [(used, each) for used, each in zip(kept, places.values()) if len(each) > 1 and not has_other_name(used)[0]]
    if not several:
        return kept, ""
    (used, _), each = several[0]
    other = next(place for place, _ in each if place != used)
    more = f"; {how_many(len(several) - 1, 'other run also has', 'other runs also have')} several records"
    note = f"{used} and {other} hold records of the same run; the first one is used, and the second one is ignored"
    return kept, note + more * (len(several) > 1)


def read_record(folder: Path) -> Record | None:
    """Return the record (results) of a run, read from the file `record.json` in the folder of the run. Return None if there is
    no such file.

    Raises ValueError, naming the file, if it is damaged or was written by another version.
    """
    path = Path(folder) / RECORD
    try:
        return parse(read_bounded(path, MOST_BYTES), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_records(path: Path, records: Iterable[Record]):
    """Write several records (results of a run) to a file in JSON Lines format (`.jsonl`), with one record in each line."""
    write_text(path, "".join(to_json(record) + "\n" for record in records))


def read_records(path: str | Path) -> list[Record]:
    """Return a list of all records (results of a run) in a `.jsonl` file, which has one record in each line, or in a folder of
    runs and all folders inside it, such as `runs/my_recipe`, sorted by their paths.

    Raises ValueError, with the file or the number of the line, if a record is damaged or was written by another version of
    smallvit, and if a folder has no record.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        found = [read_record(file.parent) for file in sorted(path.rglob(RECORD))]
        if not found:
            raise ValueError(f"there is no {RECORD} in {path} or in a folder inside it; expected the folder of finished runs")
        return [record for record in found if record is not None]
    lines = read_bounded(path, 16 * MOST_BYTES).splitlines()
    return [parse(line, f"{path}, line {number} of {len(lines)}") for number, line in enumerate(lines, 1) if line.strip()]


def one_picture_per_arm(records: Iterable[Record]) -> list[Record]:
    """Return the records (results of a run) without most of their pictures, to save space. The field `picture` shows which
    patches were merged or pruned. For each arm (variant) and number of labelled images, only the first record that has a
    picture keeps it.
    """
    seen: set[tuple] = set()
    kept = []
    for record in records:
        cell = record.arm, record.labels
        kept.append(replace(record, picture=None) if cell in seen else record)
        if record.picture is not None:
            seen.add(cell)
    return kept


def to_json(record: Record, indent: int | None = None) -> str:
    """Return a record (results of a run) as JSON text, with a hash of all its fields at the end. `indent` is the number of
    spaces for each level; without it, the text is one line.

    Raises ValueError, with the name of the field, for NaN and infinity, which JSON does not allow, and for values that `parse`
    would refuse.
    """
    plain = asdict(record)
    for name, value in plain.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"{name} of {record.arm!r} is {value}; expected finite numbers, the run has diverged") from error
    plain = json.loads(json.dumps(plain))
    if wrong := problem(plain):
        raise ValueError(f"the record of {record.arm!r} cannot be written: {wrong}")
    return json.dumps(plain | {CHECKSUM: checksum(plain)}, indent=indent)


def checksum(plain: Mapping[str, Any]) -> str:
    """Return the hash of a record (results of a run), as hexadecimal digits. `plain` is a dict of its fields, as JSON has them.
    The hash itself does not count, nor do the order of the fields and the spaces between them.
    """
    fields_of_record = {name: value for name, value in plain.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(fields_of_record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse(text: bytes, source: str) -> Record:
    """Return the `Record` (results of a run) that is written in a JSON text. `source` is the name of the file, which error
    messages show. Characters that are not safe to print are replaced, except in the settings of the run.

    A text without a hash, as earlier versions wrote it, is read without this check.

    Raises ValueError if the text is damaged, is no record, or has another format.
    """
    again = "the other records are intact: delete it and run the recipe again"
    try:
        plain = parse_json(text, parse_constant=no_constant)
    except ValueError as error:
        raise ValueError(f"{source} is damaged or is not JSON ({printable(str(error))}); {again}") from error
    if is_damaged(plain):
        raise ValueError(f"{source} is damaged: its content has another hash than its {CHECKSUM}; {again}")
    missing = [name for name in NEEDED if name not in plain] if isinstance(plain, dict) else NEEDED
    if missing:
        raise ValueError(f"{source} is not a record: it lacks {', '.join(missing)}; expected the file as smallvit wrote it")
    plain.pop(CHECKSUM, None)
    if plain.get("format", 1) != FORMAT:
        raise ValueError(
            f"{source} has record format {plain.get('format', 1)!r:.20}, and this version of smallvit reads format {FORMAT}; "
            "run the recipe again in another --out folder, or read it with the version that wrote it (format 1: smallvit 0.1)"
        )
    known = {field.name for field in fields(Record)}
    if unknown := sorted(plain.keys() - known):
        names = printable(", ".join(unknown[:5]))
        raise ValueError(f"{source} has unknown fields {names:.200}; expected a record of this smallvit version")
    try:
        if wrong := problem(plain):
            raise ValueError(wrong)
        shown = {name: all_printable(value, name == "traceback") for name, value in plain.items() if name != "run"}
        record = Record(**shown, run=plain["run"])
        record.check_scores()
        return record
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} is not a valid record: {error}") from error


def no_constant(name: str) -> float:
    """Raise ValueError for the numbers NaN, Infinity and -Infinity in a JSON text, which JSON does not have. `name` is the
    number as text.
    """
    raise ValueError(f"{name} is no number of JSON")


def is_damaged(plain: Any) -> bool:
    """Return whether the content of a record (results of a run) has changed since it was written, which its hash shows. `plain`
    is what the JSON text holds. A record without a hash, as earlier versions wrote it, counts as intact.
    """
    return isinstance(plain, dict) and CHECKSUM in plain and plain[CHECKSUM] != checksum(plain)


def settings_of(run: Mapping[str, Any], *left_out: str) -> str:
    """Return the settings of a run as JSON text, without those that `left_out` names, such as "seed". `run` has all settings as
    a dict, as `Record.run` holds them. The named settings are also left out in earlier runs that the run needs, such as
    pretraining. Runs that differ only in these settings have equal texts.
    """

    def kept(plain: Mapping[str, Any]) -> dict[str, Any]:
        nested = {name: kept(plain[name]) for name in ("init", "teacher") if isinstance(plain.get(name), Mapping)}
        return {name: value for name, value in {**plain, **nested}.items() if name not in left_out}

    return json.dumps(kept(run), sort_keys=True)


def user_line(traceback: str) -> str:
    """Return the last line of the user's own code in a Python traceback, as text: `mine.py, line 12: return x + 1`. The text is
    empty if the traceback contains no code of the user.

    Code of smallvit, of other installed packages and of Python itself is not the user's own.
    """
    package = Path(__file__).parent
    for path, number, code in reversed(re.findall(r'File "([^"]+)", line (\d+), in .*\n\s+(.*)', traceback)):
        path = path.replace("\\", "/")
        inside = path.rpartition("/smallvit/")[2]
        ours = inside != path and not inside.startswith("recipes/") and (package / inside).exists()
        if not ours and not re.search(r"/(site|dist)-packages/|/lib/python\d|^<", path):
            return f"{path.rpartition('/')[2]}, line {number}: {code}"
    return ""


def damaged_weights(folder: Path, record: Record) -> str | None:
    """Return an error message if the weights file in the folder of a run is damaged or belongs to another record, for example
    after one of the two files was copied from another machine: its hash is not the one in `record` (the results of the run).
    Otherwise return None.

    A process that was killed after it wrote the record may have left the weights under a temporary name. They are moved to
    their place first.

    The result is also None if there is no file or no hash.
    """
    path = Path(folder) / WEIGHTS
    if record.weights_sha256 is None:
        return None
    found = weights_hash(path)
    if found == record.weights_sha256:
        return None
    for left in path.parent.glob(f".{WEIGHTS}.*.new"):
        with suppress(OSError):
            if file_sha256(left) == record.weights_sha256:
                os.replace(left, path)
                return None
    if weights_hash(path) in (None, record.weights_sha256):  # another process has moved them
        return None
    return f"{path} is damaged, or does not belong to the {RECORD} beside it: its hash differs from the one in the record"


def weights_hash(path: Path) -> str | None:
    """Return the hash of a weights file, or None if there is none. Raise ValueError if it is no ordinary file."""
    try:
        check_size(path, MOST_WEIGHTS)
        return file_sha256(path)
    except FileNotFoundError:
        return None


@functools.cache
def code() -> dict:
    """Return a dict that identifies the running code of smallvit: a hash of its files (`sha256`), the git commit (`commit`),
    and whether files differ from this commit (`dirty`).

    Outside a git clone the last two are None.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "cpp", "h") for path in root.rglob(f"*.{suffix}")):
        if "recipes" not in path.relative_to(root).parts:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(root), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # a package installed inside another git repository must not report the commit of that repository
    tracked = git("ls-files", "--error-unmatch", "record.py") is not None
    return {
        "sha256": digest.hexdigest(),
        "commit": git("rev-parse", "HEAD") if tracked else None,
        "dirty": bool(git("status", "--porcelain", "--", ".")) if tracked else None,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect results, as a dict from name to version."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "scikit-learn", "scipy", "timm", "lightly"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def format_labels(labels: int | None) -> str:
    """Return a number of labelled images as text, such as `1,000 labels` or `1 label`. For None, which means that all images
    have labels, the text is `all labels`.
    """
    return "all labels" if labels is None else how_many(labels, "label")


def only_copies_are_grouped(data: Mapping[str, Any]) -> bool:
    """Return whether the groups of images are those that smallvit makes of identical images. `data` is the description of a
    data set in a record. It is False if the user has given groups, and for data sets of the user's own code.
    """
    own_groups = any(data.get(name) for name in ("group_by", "groups"))
    return data.get("call") == "smallvit.data.folder" and not own_groups


def condition_text(labels: int | None, length: int | None, tuned: bool) -> str:
    """Return a condition as text, such as `1,000 labels, 2,000 steps, tuned`: the number of labelled images (None: all), the
    training length if the comparison has several (otherwise None), and whether the settings were tuned.
    """
    steps = "" if length is None else f", {length:,} steps"
    return format_labels(labels) + steps + ", tuned" * tuned


def short_name(processor: str | None, others: Collection[str | None]) -> str | None:
    """Return the name of a processor as `cpu` gives it, but without its family and model if one of `others` has this name
    without them, as in records before version 0.3.0.
    """
    name = (processor or "").rpartition(" (family ")[0]
    return name if name in others else processor


@functools.cache
def cpu() -> str:
    """Return the name of the processor (CPU) of this machine, with the numbers of its family and model where Linux tells them,
    such as `AMD EPYC (family 26, model 2)`: virtual machines hide the name of the product, and two processors with one name
    may round differently.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())  # the first core
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{word} {facts[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if facts.get(key)]
    return f"{name} ({', '.join(numbers)})" if numbers else name
