"""Models, evaluators, transforms and loaders of a user's own: what breaks their contract is named, and no wrong score is kept."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from PIL import Image

from smallvit import AdamW, augment, digits, fit, folder, load, load_recipe
from smallvit.augment.check import check_own_transforms
from smallvit.record import RECORD, checksum
from smallvit.train.own_numbers import replaces_others

RECIPE = '''"""Parts that break their contract."""
from dataclasses import dataclass
from functools import partial
import numpy as np
import torch
from torch import nn
from smallvit import DINO, DeepEnsemble, PatchEmbed, Run, ViT, ablate, accuracy, augment, digits, knn

class Centered(nn.Module):
    """A linear model of images from which a mean is subtracted that it learns in training."""

    def __init__(self, image, channels, classes, persistent: bool = True, number: bool = False, noise: float = 0.0):
        super().__init__()
        self.linear, self.number, self.noise, self.shift = nn.Linear(image[0] * image[1] * channels, classes), number, noise, 0.0
        self.register_buffer("center", torch.zeros(self.linear.in_features), persistent=persistent)

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.center.add_(x.mean(0).detach())
            self.shift += self.number
        return self.linear(x - self.center - self.shift + self.noise * torch.randn(x.shape))

class Pair(Centered):
    def forward(self, x):
        return super().forward(x), x

@dataclass
class Counting:
    calls: int = 0

    def __call__(self, batch, generator):
        return batch

@dataclass(frozen=True)
class Change:
    """It changes images in the way that its option names."""

    way: str = "noise"

    def __call__(self, batch, generator):
        x = batch.images
        if self.way == "noise without the generator":
            x = x + torch.rand(x.shape)
        elif self.way == "noise of NumPy":
            x = x + torch.from_numpy(np.random.rand(*x.shape)).float()
        elif self.way == "noise":
            x = x + torch.rand(x.shape, generator=generator)
        elif self.way == "tensor":
            return x
        ways = {"size": x[..., 1:, 1:], "fewer": x[1:], "float64": x.double()}
        return batch._replace(images=ways.get(self.way, x))

@dataclass(frozen=True)
class Smaller(Change):
    """It says that it changes the size."""

    way: str = "size"

    def output_size(self, height, width):
        return height - 1, width - 1

class Cached(Centered):
    """It keeps a table that is made when the model is evaluated."""

    def forward(self, x):
        if not self.training:
            self.register_buffer("table", torch.zeros(len(x), 1), persistent=False)
        return super().forward(x)

class Lazy(Centered):
    """It has a table that its first step makes."""

    def __init__(self, image, channels, classes):
        super().__init__(image, channels, classes)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            self.table = torch.zeros(1)
        return super().forward(x)

class Fixed(nn.Module):
    """It has no parameters."""

    def __init__(self, image, channels, classes):
        super().__init__()

    def features(self, x):
        return x.flatten(1)

    def forward(self, x):
        return x.flatten(1)[:, :10]

class Late(Centered):
    """It makes a buffer that is saved in its first step."""

    def forward(self, x):
        if self.training and not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        return super().forward(x)

class Seeded(Centered):
    """It has whole numbers that are no sizes."""

    def __init__(self, image, channels, classes, count: int = 100, seed: int = 20240131):
        super().__init__(image, channels, classes)

class Annealed(Centered):
    """Its logits are divided by a temperature that falls with the progress of the training."""
    progress = 0.0

    def __init__(self, image, channels, classes):
        super().__init__(image, channels, classes)
        self.progress = 0.0

    def forward(self, x):
        return super().forward(x) / (10 - 9 * self.progress)

class QueryPool(nn.Module):
    """A query that is learned attends to the tokens."""
    class_tokens = 0

    def __init__(self, dim):
        super().__init__()
        self.query, self.linear = nn.Parameter(torch.ones(1, 1, dim)), nn.Linear(dim, dim)

    def forward(self, x, size=None, prefix=0):
        return ((self.linear(self.query.expand(len(x), -1, -1)) @ x.mT).softmax(-1) @ x)[:, 0]

def from_timm(image, channels, classes):
    import timm
    return timm.models.VisionTransformer(img_size=image, patch_size=4, in_chans=channels, num_classes=classes, embed_dim=8, depth=1,
                                         num_heads=2)

def text(model, splits):
    yield "text", "0.5"

def pairs(model, splits):
    return [["score", 0.5]]

def nothing(model, splits):
    yield from ()

def plain(model, splits):
    return 0.5

def dictionary(model, splits):
    return {"score": 0.5}

def single(model, splits):
    yield 0.5

def vector(model, splits):
    yield "vector", np.zeros(2)

def undefined(model, splits):
    yield "undefined", float("nan")

def destroys(model, splits):
    with torch.no_grad():
        next(model.parameters()).zero_()
    yield "destroyed", 1.0

def pair():
    return digits().train, digits().test

run = Run(data=digits, model=Centered, steps=4, batch=8, lr=1e-2, ema=0.0, val=20)
arms = {"saved": run, "buffer": run.vary(persistent=False), "number": run.vary(number=True), "noise": run.vary(noise=0.1)}
arms |= {"average": run.vary(persistent=False, ema=0.05), "tuple": run.vary(model=Pair), "data": run.vary(data=pair)}
arms |= {each.__name__: run.vary(evaluators=(each,)) for each in (nothing, plain, dictionary, single, text, pairs)}
arms |= {"timm": run.vary(model=from_timm), "untrained timm": run.vary(model=from_timm, steps=0), "cached": run.vary(model=Cached)}
arms |= {"fixed": run.vary(model=Fixed, steps=0, evaluators=(knn,)), "late": run.vary(model=Late), "lazy": run.vary(model=Lazy, ema=0.1)}
vit = run.vary(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=1), steps=2)
ways = ("noise", "noise without the generator", "noise of NumPy", "tensor", "size", "fewer", "float64")
arms |= {f"transform: {way}": vit.vary(augment=(*augment.digits(), Change(way))) for way in ways}
views = (augment.MultiCrop(first=(augment.Warp(crop=(0.5, 1)), Change("noise of NumPy"))),)
arms |= {"views": vit.vary(augment=views, objective=DINO, unlabelled=True, evaluators=(knn,))}
arms |= {each.__name__: run.vary(evaluators=(accuracy, each)) for each in (vector, undefined)}
arms |= {"seeded": run.vary(model=Seeded), "seeded twice": run.vary(model=partial(DeepEnsemble, of=Seeded, count=2))}
arms |= {"number, averaged": run.vary(number=True, ema=0.5), "progress": run.vary(model=Annealed)}
arms |= {"progress, averaged": run.vary(model=Annealed, ema=0.5), "query": vit.vary(pool=QueryPool)}
ensemble = run.vary(model=partial(DeepEnsemble, of=Centered, count=2), evaluators=(knn,))
of_timm = ensemble.vary(model=partial(DeepEnsemble, of=from_timm, count=2))
arms |= {"ensemble": ensemble, "ensemble of timm": of_timm, "untrained ensemble": of_timm.vary(steps=0)}
arms |= {"destroys": run.vary(evaluators=(accuracy, destroys))}
RUNS = ablate(arms, labels=[50], seeds=range(1), references=False)
'''


@pytest.fixture
def arms(tmp_path) -> dict:
    """The run of each arm of the recipe."""
    (tmp_path / "own.py").write_text(RECIPE)
    return {entry.arm: entry.run for entry in load_recipe(tmp_path / "own.py").RUNS}


@pytest.mark.parametrize("arm", ["saved", "noise", "seeded", "seeded twice"])
def test_model_of_your_own_is_trained_scored_and_loaded(arm, arms, tmp_path):
    record = fit(arms[arm], tmp_path / "run")
    model, images = load(tmp_path / "run").model.eval(), digits().test.open()
    torch.manual_seed(0)
    pixels = images.spec.normalize(images.images / 255)
    right = (model(pixels).argmax(1) == images.labels).float().mean()
    assert record.test["accuracy"] == pytest.approx(right.item(), abs=0.05 if arm == "noise" else 1e-6)


@pytest.mark.parametrize(
    "arm",
    ["timm", "untrained timm", "cached", "lazy", "fixed", "pairs", "query", "ensemble of timm", "untrained ensemble"],
)
def test_other_models_and_evaluators_of_your_own_are_not_refused(arm, arms, tmp_path):
    record = fit(arms[arm], tmp_path / "run")
    assert record.finished and record.test[record.score] >= 0


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("buffer", "Centered.center is not saved; expected parameters, or register_buffer"),
        ("average", "Centered.center is not saved"),
        ("number", "Centered.shift is not saved"),
        ("number, averaged", "Centered.shift is not saved"),
        ("progress", "Annealed.progress is not saved"),
        ("progress, averaged", "Annealed.progress is not saved"),
        ("vector", r"vector gave \('vector', array\(\[0., 0.\]\)\); expected pairs"),
        ("undefined", r"undefined gave \('undefined', nan\); expected a finite number"),
        ("tuple", "the model gave a tuple; expected a tensor of logits"),
        ("nothing", r"nothing judges the run and has given no number; expected at least one pair \(name, number\)"),
        ("plain", "plain gave 0.5; expected pairs"),
        ("text", r"text gave \('text', '0.5'\); expected pairs"),
        ("late", "the trained model has other weights than a new one, .*: seen; expected a model that makes all"),
        ("dictionary", r"dictionary gave {'score': 0.5}; expected pairs"),
        ("single", r"single gave 0.5; expected pairs \(name, number\), such as yield"),
        ("destroys", "destroys has changed the model, which others are still to judge; change a copy"),
        ("data", "pair returned a tuple; expected a Dataset, as folder"),
    ],
)
def test_broken_contract_is_named(arm, message, arms, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(arms[arm], tmp_path / "run")


def test_features_that_the_members_of_an_ensemble_lack_are_missed_before_the_training(arms, tmp_path):
    steps = []
    with pytest.raises(ValueError, match="Centered does not say what its head receives"):
        fit(arms["ensemble"], tmp_path / "run", watch=lambda step, _: steps.append(step))
    assert not steps


REPEATED = "returned two different batches for the same batch and the same random numbers, .* draw all numbers from the generator"


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("transform: noise of NumPy", f"Change in augment {REPEATED}"),
        ("views", f"MultiCrop in augment {REPEATED}"),
        ("transform: tensor", "Change in augment returned a Tensor; expected a Batch, such as batch._replace"),
        ("transform: size", r"images \(8, 1, 7, 7\) .* expected \(8, 1, 8, 8\) .* needs a method output_size"),
        ("transform: fewer", r"images \(7, 1, 8, 8\) and targets \(8, 10\); expected \(8, 1, 8, 8\) and \(8, 10\)"),
        ("transform: float64", "returned images of torch.float64; expected torch.float32"),
    ],
)
def test_transform_that_breaks_its_contract_is_refused_before_training(arm, message, arms, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(arms[arm], tmp_path / "run")


@pytest.mark.parametrize("noise", ["noise", "noise without the generator"])
def test_transform_of_your_own_is_tried_without_a_change_of_the_run(noise, arms, tmp_path, monkeypatch):
    record = fit(arms[f"transform: {noise}"], tmp_path / "run")
    monkeypatch.setattr(sys.modules["smallvit.train.fit"], "check_own_augmentation", lambda training, views: None)
    unchecked = fit(arms[f"transform: {noise}"], tmp_path / "unchecked")
    assert record.trace == unchecked.trace and record.finished


def test_transform_that_says_how_it_changes_the_size_is_not_refused(arms):
    own = sys.modules["recipes.own"]
    batch = augment.Batch(torch.rand(3, 1, 8, 8), torch.eye(3))
    before = torch.get_rng_state()
    check_own_transforms((*augment.digits(), own.Smaller(), own.Change(), own.Smaller()), batch)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"images \(3, 1, 6, 6\) .* expected \(3, 1, 7, 7\)"):
        check_own_transforms((own.Smaller(), own.Change("size")), batch)


def test_transform_whose_values_can_change_is_refused(arms):
    changing = sys.modules["recipes.own"].Counting()
    with pytest.raises(ValueError, match=r"Counting is a dataclass whose values can change .* expected @dataclass\(frozen=True\)"):
        arms["saved"].vary(augment=(changing,))


@pytest.mark.parametrize("model", ["four", "partial(four, width=3)"])
def test_model_with_four_required_arguments_is_refused(model, tmp_path):
    four = f"\ndef four(image, channels, classes, width): ...\nRun(model={model})\n"
    (tmp_path / "own.py").write_text(RECIPE + four)
    with pytest.raises(ValueError, match=r"four cannot be called as a model, with \(image, .* give further options a default"):
        load_recipe(tmp_path / "own.py")
    (tmp_path / "own.py").write_text(RECIPE + four.replace("width)", "*, width)"))
    with pytest.raises(ValueError, match="model has no 'width'") if model == "four" else nullcontext():
        load_recipe(tmp_path / "own.py")
    (tmp_path / "own.py").write_text(RECIPE + four.replace("width)", "width, /)").replace("width=3", ""))
    with pytest.raises(ValueError, match="four cannot be called as a model"):
        load_recipe(tmp_path / "own.py")


def test_wrong_preprocessing_in_a_record_is_no_problem_of_the_code_of_the_recipe(arms, tmp_path):
    fit(arms["saved"], tmp_path)
    plain = json.loads((tmp_path / RECORD).read_text())
    plain["preprocess"]["std"] = [0.0]
    (tmp_path / RECORD).write_text(json.dumps(plain | {"checksum": checksum(plain)}))
    with pytest.raises(ValueError, match=r"the settings in .* are not valid: Preprocess: std is \(0\.0,\)"):
        load(tmp_path)


def test_model_of_a_recipe_that_is_not_loaded_or_has_changed_is_not_called_damaged(arms, tmp_path):
    fit(arms["saved"], tmp_path / "run")
    del sys.modules["recipes.own"]
    with pytest.raises(ValueError, match=r"needs code of recipes\.own as it was .* smallvit\.load_recipe\(path\), .* nothing is lost"):
        load(tmp_path / "run")
    (tmp_path / "own.py").write_text(RECIPE.replace("x.mean(0).detach()", "x.mean(0)"))
    load_recipe(tmp_path / "own.py")
    with pytest.raises(ValueError, match=r"undo changes of this code; nothing is lost \(recipes.own.Centered has changed"):
        load(tmp_path / "run")


@pytest.mark.parametrize("options", [{"folds": 2}, {"folds": 2, "test": 0.5}, {"test": 0.3}], ids=str)
def test_training_images_are_left_out_together_with_their_groups(options, tmp_path):
    for name, color in (("dark", 0), ("light", 255)):
        (tmp_path / name).mkdir()
        for patient in range(7):
            for number in range(3):
                pixels = torch.full((8, 8), color, dtype=torch.uint8)
                pixels[patient, number] = 128  # all images differ
                Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{name}{patient}_{number}.png")
    data = folder(str(tmp_path), group_by=r"(.*)_.*", **options)
    chosen = torch.arange(len(data.train)) != 3
    with pytest.raises(ValueError, match=r"has groups of \d+ training images, and \d+ of these images; .* use data\.keep\(chosen\)"):
        replace(data, train=data.train.take(chosen))
    kept = data.keep(chosen)
    for seed in range(2 if "folds" in options else 1):
        one = kept.at_seed(seed)
        patients = [{file.rpartition("_")[0] for file in images.files} for images in (one.train, one.test.open())]
        assert not patients[0] & patients[1] and len(one.train) == len(one.groups)
    assert set(kept.train.files) == set(data.train.files) - {data.train.files[3]}
    with pytest.raises(ValueError, match=r"chosen is torch\.int64 .* expected torch\.bool"):
        data.keep(torch.arange(3))


def test_numbers_of_a_checkpoint_replace_only_numbers():
    optimizer = AdamW([{"params": [torch.nn.Parameter(torch.zeros(2))], "weight_decay": 0.0}])
    assert not replaces_others(optimizer, {"calls": 1, "param_groups.0.calls": 1, "param_groups.0.weight_decay": 0.1})
    for name in ("step", "param_groups", "param_groups.0.params"):
        assert replaces_others(optimizer, {name: 1})
