"""Damaged and hostile files: every outcome is a clean result or one ValueError that names the file, and no code in a file runs.

Each kind of case changes an intact file at random: single bits, cut or doubled parts, or, as an attacker who also knows the
hashes, values of other types, huge numbers, deep nesting and characters that deceive a terminal. The suite tries a few cases of
each kind; `-m long` tries more than 10,000.
"""

import base64
import copy
import json
import os
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from toys import TINY_VIT, slow_after, slow_but

from smallvit import Preprocess, Run, arrays, augment, digits, fit, html, load, markdown
from smallvit.packing import pack_bits
from smallvit.pretrained import files as pretrained_files
from smallvit.record import CHECKPOINT, RECORD, WEIGHTS, Record, checksum, read_record, read_records, to_json
from smallvit.run import fingerprint
from smallvit.shapes import printable
from smallvit.storage import file_sha256
from smallvit.train import checkpoint
from smallvit.train.initialize import load_from_run
from smallvit.train.loop import Training
from smallvit.verdicts import compare

SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=8, batch=8, augment=augment.digits())
MANY = [
    None, True, False, 0, 1, 2, -1, 3, 10**6, 10**30, 10**400, 0.0, 0.5, 1.0, -2.5, 1e30, 1e-30, 1e308, 5e-324, "", "x", "0.5", "\x1b[2J\x1b[31m", "a\u202eb",
    "\0", "\ud800", "ä" * 300, [], {}, [[]], [None], {"": None}, {"call": 3}, {"call": "os.system"}, {"make": "x"}, [0.5] * 9,
    ["a", 1], [[1, 2, 3]], {"a": {"b": []}}, "NaN literal", "Infinity literal", "1e999 literal",
]  # fmt: skip
DEEP = 2_000  # levels of a nested list, more than Python can follow


class Damage:
    """Random changes of a file, always the same for one seed."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)

    def of_bytes(self, content: bytes) -> bytes:
        """The content with a few flipped bits, or cut, or with a part that is doubled, missing or zero."""
        kind, data = self.random.randrange(8), bytearray(content)
        start = self.random.randrange(len(data))
        end = min(len(data), start + self.random.choice((1, 7, 100, 4096)))
        if kind < 4:
            for _ in range(self.random.choice((1, 1, 1, 3))):
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        elif kind == 4:
            del data[start:]
        elif kind == 5:
            del data[start:end]
        elif kind == 6:
            data[start:start] = data[start:end]
        else:
            data[start:end] = bytes(end - start)
        return bytes(data)

    def of_json(self, plain: dict) -> str:
        """JSON text in which a random part is replaced, missing or added, as an attacker does who also writes the checksum."""
        plain = copy.deepcopy(plain)
        for _ in range(self.random.choice((1, 1, 2))):
            self.change(plain)
        try:
            plain["checksum"] = checksum(plain)
        except (ValueError, RecursionError):
            plain["checksum"] = ""
        text = json.dumps(plain)
        for literal in ("NaN", "Infinity", "1e999"):
            text = text.replace(f'"{literal} literal"', literal)
        return text.replace('"deep"', "[" * DEEP + "]" * DEEP)

    def change(self, plain: dict):
        """Change one random value inside nested dicts and lists, in place."""
        holder: object = plain
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = self.random.choice(keys)
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and self.random.random() < 0.85:
                holder = inner
                continue
            break
        kind, like = self.random.randrange(18), [value for value in MANY if type(value) is type(inner)]
        if kind == 0:
            del holder[key]
        elif kind >= 12 and like:
            holder[key] = copy.deepcopy(self.random.choice(like))
        elif kind >= 12:
            holder[key] = None
        elif kind == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(inner))
        elif kind == 1:
            holder[self.random.choice(["extra", "\x1b[31m", "a\u202eb", ""])] = copy.deepcopy(inner)
        elif kind == 2 and type(inner) in (int, float):
            holder[key] = self.random.choice([-inner, inner * 1e20, inner + 1, inner / 7, int(inner), str(inner)])
        elif kind == 3:
            holder[key] = "deep"
        else:
            holder[key] = copy.deepcopy(self.random.choice(MANY))


def outcome(call: Callable[[], object], name: str, same: Callable[[object], bool] = lambda result: True) -> str:
    """What became of a case: "refused" by one ValueError that has `name` in it, "clean" with a result for which `same` is True,
    "silent" with another result, "unnamed" or, for any other exception, "crash" with its text.
    """
    try:
        result = call()
    except ValueError as error:
        text = str(error)
        if text != printable(text, lines=True):
            return f"unsafe to print: {printable(text)[:150]}"
        return "refused" if name in text else f"unnamed: {text[:150]}"
    except Exception as error:
        where = error.__traceback__
        while where.tb_next:
            where = where.tb_next
        place = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
        return f"crash: {type(error).__name__} {place} {printable(str(error))[:150]}"
    return "clean" if same(result) else "silent"


# Records


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run. Tests must not change it."""
    folder = tmp_path_factory.mktemp("trained")
    fit(SHORT, folder)
    return folder


def full_records(record: Record, folds: int | None = None) -> list[Record]:
    """Records of three arms with four runs each, in which nearly every field has a value. With `folds`, the runs are those of a
    cross-validation with two passes over all images.
    """
    pixels = base64.b64encode(zlib.compress(bytes(3 * 8 * 8))).decode()
    groups = [[[k // 2 for k in range(16)] for _ in range(2)] for _ in range(3)]
    found = []
    for number, (arm, role) in enumerate({"scratch": "baseline", "+A": "technique", "+B": "technique"}.items()):
        for seed in range(4):
            right = [(k * 7 + seed) % 10 > 3 - number for k in range(60)]
            share, mine = sum(right) / 60, {"init": {"make": "smallvit.pretrained.Weights", "name": "w"}}
            matrix = [[10 if row == column else 2 * (column == 0) for column in range(10)] for row in range(10)]
            tuning = {
                "settings": {"lr": 1e-3 * (number + 1)}, "trials": 3, "labels": 70, "images_seen": 64, "seconds": 1.5,
                "loss": 0.01, "edge": ["lr"], "curve": [[{"lr": 1e-3 * k}, 0.3 + 0.1 * k, 2] for k in (1, 2, 3)],
            }  # fmt: skip
            picture = {"shape": [3, 8, 8, 1], "grid": [4, 4], "blocks": [0, 1], "groups": groups, "pixels": pixels}
            costs = {"images_seen": 10, "steps": 2, "seconds": 1.0}
            one = replace(
                record,
                recipe="mine", arm=arm, role=role, baseline="scratch", labels=50, seed=seed, length=8, fingerprint=f"f{arm}",
                run=record.run | {"lr": 1e-3 * (number + 1)} | mine, tuning=None if folds else tuning,
                score="accuracy", test={"accuracy": share, "nll": 1.5, "ece": 0.1, "knn_1": 0.4, "macs": 1e6, "ms": 2.0},
                probes=["knn_1"], correct=pack_bits(right) if number else None, test_images=60, test_majority=0.1,
                confusion=matrix, reliability=[[4, 0.1 * k, 0.09 * k] for k in range(10)],
                chosen_on_val={"what": "early stop", "labels": 20}, curve=[[2 * k, 2.0 / k, 0.1 * k] for k in range(1, 5)],
                health=[{"step": 8, "rank": 3.0, "knn_1": 0.5}], picture=None if seed else picture,
                pretraining=costs | {"labels": 5, "unlabelled": 7, "fingerprint": "fscratch", "runs": {"fscratch": costs}},
                init_weights={"name": "w", "sha256": "ab", "loaded": 3, "missing": ["head.weight"], "mean": [0.5]},
                tokens=16, macs=10**6, unlabelled=7, stacked=2, test_settings=3, removed=1, unused_seeds=[7], test_repeats=1,
                looks=[2, 4] if number and not folds else None,
            )  # fmt: skip
            if folds:
                index = pack_bits([k % 2 == seed % 2 for k in range(120)])
                parts = {"folds": folds, "pool_images": 120, "test_index": index, "test_groups": [k % 9 for k in range(60)]}
                one = replace(one, correct=pack_bits(right), **parts)
            found.append(one)
    lost = {"test": None, "val": None, "score": None, "correct": None, "confusion": None, "reliability": None, "curve": None}
    return [*found[:-1], replace(found[-1], status="interrupted", error="killed", traceback="Traceback\n  a", **lost)]


@pytest.fixture(scope="module")
def comparisons(trained) -> list[list[Record]]:
    """The records of a comparison, and of one by cross-validation."""
    return [full_records(read_record(trained), folds) for folds in (None, 2)]


def flipped_record(damage: Damage, folder: Path, request) -> str:
    """A record whose file was damaged."""
    intact = request.getfixturevalue("trained") / RECORD
    record, path = read_record(intact.parent), folder / RECORD
    path.write_bytes(damage.of_bytes(intact.read_bytes()))
    return outcome(lambda: read_record(folder), str(path), lambda found: found == record)


def hostile_record(damage: Damage, folder: Path, request) -> str:
    """A record that somebody made, in the folder of a run that is loaded."""
    intact = request.getfixturevalue("trained")
    (folder / RECORD).write_text(damage.of_json(json.loads((intact / RECORD).read_text())))
    if not (folder / WEIGHTS).exists():
        os.link(intact / WEIGHTS, folder / WEIGHTS)
    return outcome(lambda: load(folder), str(folder), lambda model: printable(model.record.arm) == model.record.arm)


def hostile_report(damage: Damage, folder: Path, request, show: Callable = markdown) -> str:
    """A file with the records of a comparison, of which somebody made one, and its report."""
    path, comparison = folder / "mine.jsonl", damage.random.choice(request.getfixturevalue("comparisons"))
    lines = [to_json(record) for record in comparison]
    index = damage.random.randrange(len(lines))
    lines[index] = damage.of_json(json.loads(lines[index]))
    path.write_text("\n".join(lines), errors="surrogatepass")
    found: list[Record] = []
    read = outcome(lambda: found.extend(read_records(path)), str(path))
    if read != "clean":
        return read

    def safe(page: object) -> bool:
        return str(page) == printable(str(page), lines=True)

    if show is compare:
        return outcome(lambda: compare(found), "")
    return outcome(lambda: show(found, title="mine", doc="Why?"), "", safe)


def hostile_verdict(damage: Damage, folder: Path, request) -> str:
    """The same file, compared with intact records as `smallvit verify` does."""
    from smallvit.report import compare_with_committed

    path, comparison = folder / "mine.jsonl", request.getfixturevalue("comparisons")[0]
    record = damage.random.choice(comparison)
    path.write_text(damage.of_json(json.loads(to_json(record))), errors="surrogatepass")
    found: list[Record] = []
    read = outcome(lambda: found.extend(read_records(path)), str(path))
    if read != "clean":
        return read
    return outcome(lambda: compare_with_committed(found, comparison), "")


# Weights


def flipped_weights(damage: Damage, folder: Path, request) -> str:
    """Weights whose file was damaged, loaded and used as initialization."""
    intact, path = request.getfixturevalue("trained"), folder / WEIGHTS
    path.write_bytes(damage.of_bytes((intact / WEIGHTS).read_bytes()))
    (folder / RECORD).write_bytes((intact / RECORD).read_bytes())
    if path.read_bytes() == (intact / WEIGHTS).read_bytes():
        return "clean"
    if damage.random.random() < 0.5:
        return outcome(lambda: load(folder), str(path), lambda _: False)
    model = SHORT.model((8, 8), 1, 10)
    return outcome(lambda: load_from_run(model, folder, fingerprint(SHORT)), str(path), lambda _: False)


def hostile_weights(damage: Damage, folder: Path, request) -> str:
    """Weights that somebody made, whose header is not what it should be. The record has the right hash of this file."""
    intact, path = request.getfixturevalue("trained"), folder / WEIGHTS
    content = (intact / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    plain = json.loads(content[8 : 8 + length])
    damage.change(plain)
    header = json.dumps(plain).replace('"deep"', "[" * DEEP + "]" * DEEP).encode(errors="surrogatepass")
    size = damage.random.choice([len(header)] * 9 + [2**63, 2**40, 0, len(header) - 1])
    path.write_bytes(struct.pack("<Q", size) + header + content[8 + length :])
    record = replace(read_record(intact), weights_sha256=file_sha256(path) if damage.random.random() < 0.9 else None)
    (folder / RECORD).write_text(to_json(record))
    model, expected = SHORT.model((8, 8), 1, 10), load(intact).model.state_dict()

    def load_both() -> bool:
        load_from_run(model, folder, fingerprint(SHORT))
        state = load(folder).model.state_dict()
        return all(torch.equal(state[name], tensor) for name, tensor in expected.items())

    return outcome(load_both, str(folder), lambda result: True)


# Checkpoints


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Training, Path]:
    """A training at step 3, and its checkpoint. Tests must not change them."""
    path, training = tmp_path_factory.mktemp("interrupted") / CHECKPOINT, new_training()
    for _ in range(3):
        training.train_step()
    training.validate()
    checkpoint.save([training], path)
    return training, path


def new_training() -> Training:
    training = Training(SHORT, digits(), digits().subset(labels=50, val=20, seed=0), "cpu")
    training.origin = "here"
    return training


def resumed(path: Path, interrupted: Training) -> str:
    """What became of a training whose checkpoint was changed: it starts again, and the file is set aside, or it is resumed."""
    training = new_training()
    training.checkpoint_file = path
    result = outcome(lambda: checkpoint.resume([training]), str(path))
    if result != "clean":
        return result
    if training.step == 0:
        aside = path.with_name(f"{path.name}.damaged")
        started = all(torch.equal(a, b) for a, b in zip(training.model.parameters(), new_training().model.parameters()))
        return "refused" if started and (aside.exists() or path.exists()) else "silent"
    training.train_step()
    return "clean"


def flipped_checkpoint(damage: Damage, folder: Path, request) -> str:
    """A checkpoint whose file was damaged."""
    training, intact = request.getfixturevalue("interrupted")
    training.origin = "here"
    path = folder / CHECKPOINT
    path.write_bytes(damage.of_bytes(intact.read_bytes()))
    if path.read_bytes() == intact.read_bytes():
        return "clean"
    result = resumed(path, training)
    return "silent" if result == "clean" else result


def hostile_checkpoint(damage: Damage, folder: Path, request) -> str:
    """A checkpoint that somebody made, with a right hash, in which a random value is another."""
    training, intact = request.getfixturevalue("interrupted")
    states = torch.load(intact, weights_only=True)
    holder = states
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = damage.random.choice(keys)
        if isinstance(holder[key], dict | list) and holder[key] and damage.random.random() < 0.9:
            holder = holder[key]
            continue
        break
    values = [*MANY, torch.zeros(3), torch.zeros(10**5), torch.zeros(1).expand(10**9), torch.zeros((), dtype=torch.int8)]
    holder[key] = damage.random.choice(values)
    path, save = folder / CHECKPOINT, checkpoint.state_of
    try:
        checkpoint.state_of = lambda _: states[0]
        checkpoint.save([training], path)
    finally:
        checkpoint.state_of = save
    return resumed(path, training)


# Weights from elsewhere


TIMM = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}
NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def start_weights(damage: Damage, folder: Path, request) -> str:
    """A file of external weights: damaged, or made by somebody."""
    monkeypatch = request.getfixturevalue("monkeypatch")

    def on_meta(name: str):
        with torch.device("meta"):
            return timm.models.VisionTransformer(**TIMM)

    monkeypatch.setattr(pretrained_files, "timm_on_meta", on_meta)
    state = timm.models.VisionTransformer(**TIMM).state_dict()
    suffix = damage.random.choice((".safetensors", ".pth"))
    path = folder / f"weights{suffix}"
    if suffix == ".pth" and damage.random.random() < 0.6:
        odd = [torch.zeros(3), torch.zeros(2, 2).to_sparse(), torch.zeros(16, dtype=torch.complex64), torch.zeros(0), *MANY,
               torch.zeros(16, dtype=torch.int64), torch.full((16,), torch.nan), torch.zeros(16).to(torch.float8_e5m2),
               torch.empty(16, device="meta"), torch.zeros(1).expand(10**9)]  # fmt: skip
        target: object = dict(state)
        key = damage.random.choice([*state, "extra", 3, None, "\x1b[31m"])
        target[key] = damage.random.choice(odd)
        wrapped = damage.random.choice([target, {"model": target}, {"teacher": target}, {"state_dict": 3, "model": target}, [target]])
        torch.save(wrapped, path)
    else:
        save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
        path.write_bytes(damage.of_bytes(path.read_bytes()))
    return outcome(lambda: pretrained_files.read_weights(path, NAME), path.name)


# Images and arrays


def damaged_image(damage: Damage, folder: Path, request) -> str:
    """An image file that was damaged."""
    shape = Preprocess(size=(8, 8), channels=1, mean=(0.5,), std=(0.25,), classes=("a", "b"))
    path = folder / f"image.{damage.random.choice(('png', 'bmp', 'jpg', 'tiff', 'gif'))}"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path)
    path.write_bytes(damage.of_bytes(path.read_bytes()))
    return outcome(lambda: shape(path), path.name)


def damaged_arrays(damage: Damage, folder: Path, request) -> str:
    """A file of arrays that was damaged."""
    path, labels = folder / "a.npz", np.arange(30) % 3
    images = np.arange(30 * 16, dtype=np.uint8).reshape(30, 4, 4)
    save = damage.random.choice((np.savez, np.savez_compressed))
    save(path, train_images=images[:20], train_labels=labels[:20], test_images=images[20:], test_labels=labels[20:])
    path.write_bytes(damage.of_bytes(path.read_bytes()))
    arrays.cache_clear()
    return outcome(lambda: arrays(path=str(path)), path.name)


# kind of case -> the function, and how many cases the suite and the long test try
KINDS: dict[str, tuple[Callable, int, int]] = {
    "record, damaged": (flipped_record, 60, 3_000),
    "record, made by somebody": (hostile_record, 40, 1_500),
    "records to report": (hostile_report, 20, 1_500),
    "records to verdicts": (partial(hostile_report, show=compare), 20, 500),
    "records to page": (partial(hostile_report, show=html), 0, 60),
    "records to verify": (hostile_verdict, 20, 500),
    "weights, damaged": (flipped_weights, 25, 1_200),
    "weights, made by somebody": (hostile_weights, 15, 600),
    "checkpoint, damaged": (flipped_checkpoint, 25, 800),
    "checkpoint, made by somebody": (hostile_checkpoint, 15, 500),
    "weights from elsewhere": (start_weights, 15, 600),
    "image, damaged": (damaged_image, 40, 600),
    "arrays, damaged": (damaged_arrays, 15, 400),
}


def tried(kind: str, count: int, tmp_path: Path, request) -> Counter:
    """The outcomes of so many cases of a kind, each with its number."""
    case, found = KINDS[kind][0], Counter()
    for number in range(count):
        folder = tmp_path / f"case{number % 20}"
        if folder.exists():
            for path in folder.iterdir():
                path.unlink()
        folder.mkdir(exist_ok=True)
        found[case(Damage(f"{kind} {number}"), folder, request)] += 1
    return found


QUICK = {"record, damaged", "record, made by somebody", "records to verify", "weights, damaged", "checkpoint, damaged", "image, damaged", "arrays, damaged"}


@pytest.mark.parametrize("kind", slow_but(QUICK, [kind for kind, (_, few, _) in KINDS.items() if few]))
def test_damaged_and_hostile_files_are_refused_by_name_or_read_unchanged(kind, tmp_path, request):
    found = tried(kind, KINDS[kind][1], tmp_path, request)
    assert set(found) <= {"clean", "refused"} and found["refused"] > 0, found


@pytest.mark.long
def test_more_than_10_000_damaged_and_hostile_files(tmp_path, request, capsys):
    assert sum(many for _, _, many in KINDS.values()) >= 10_000
    found = {}
    for kind, (_, _, many) in KINDS.items():
        (tmp_path / kind).mkdir()
        found[kind] = tried(kind, many, tmp_path / kind, request)
        with capsys.disabled():
            print(f"{kind}: {many:,} cases, {dict(found[kind].most_common(12))}", flush=True)
    assert all(set(each) <= {"clean", "refused"} for each in found.values())


# Code in files


class Evil:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: object, *arguments: object):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


EVIL: dict[str, Callable[[Path], object]] = {
    "shell": lambda mark: Evil(os.system, f"touch {mark}"),
    "exec": lambda mark: Evil(exec, f"open({str(mark)!r}, 'w')"),
    "eval": lambda mark: Evil(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Evil(open, str(mark), "w"),
    "path": lambda mark: Evil(Path.touch, mark),
    "nested": lambda mark: {"model": {"head.weight": torch.zeros(3), "head.bias": [Evil(os.mkdir, str(mark))]}},
    "state of a tensor": lambda mark: Evil(torch._utils._rebuild_tensor_v2, Evil(os.mkdir, str(mark)), 0, (1,), (1,), False, {}),
    "list": lambda mark: [{"step": 1, "objective": Evil(os.makedirs, str(mark))}],
}


@pytest.mark.parametrize("old", slow_after(1, [False, True]), ids=["zip", "old format"])
@pytest.mark.parametrize("kind", EVIL)
def test_code_in_a_file_never_runs(kind, old, tmp_path, trained, interrupted, monkeypatch):
    mark = tmp_path / "executed"
    content = EVIL[kind](mark)
    torch.save(content, tmp_path / "evil.pth", _use_new_zipfile_serialization=not old)
    pickled, training = (tmp_path / "evil.pth").read_bytes(), new_training()
    training.checkpoint_file = tmp_path / CHECKPOINT
    for sealed in (False, True):  # without and with the hash of a checkpoint
        if sealed:
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint, "state_of", lambda _: content)
                checkpoint.save([interrupted[0]], training.checkpoint_file)
        else:
            training.checkpoint_file.write_bytes(pickled)
        checkpoint.resume([training])
        assert training.step == 0 and (tmp_path / f"{CHECKPOINT}.damaged").exists()
    with pytest.raises(ValueError, match=r"evil\.pth"):
        pretrained_files.read_weights(tmp_path / "evil.pth", NAME)
    (tmp_path / WEIGHTS).write_bytes(pickled)
    (tmp_path / RECORD).write_text(to_json(replace(read_record(trained), weights_sha256=file_sha256(tmp_path / WEIGHTS))))
    with pytest.raises(ValueError, match=WEIGHTS):
        load(tmp_path)
    objects = np.array([content] * 4, dtype=object)
    np.savez(tmp_path / "a.npz", train_images=objects, train_labels=objects, test_images=objects, test_labels=objects)
    with pytest.raises(ValueError, match=r"a\.npz"):
        arrays(path=str(tmp_path / "a.npz"))
    assert not mark.exists()
    with suppress(AttributeError):  # the code runs, and then returns no tensor
        torch.load(tmp_path / "evil.pth", weights_only=False)
    assert mark.exists(), "this file would have run no code anyway"
