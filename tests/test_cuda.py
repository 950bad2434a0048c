"""Training on a GPU: CUDA graphs, stacks, checkpoints. Many tests need a GPU. The others test on a CPU when and how steps are
recorded.
"""

import random
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_semi_supervised import FIXMATCH
from test_stack import SHORT, STACKABLE, WITHOUT_LABELS, Killed, distilled
from toys import slow_after

from smallvit import (
    DINO,
    SAM,
    Block,
    ConvTokenizer,
    Data2Vec,
    MeanTokens,
    Prune,
    Run,
    SmallCNN,
    augment,
    digits,
    export,
    fit,
    load,
    textured_shapes,
)
from smallvit.numerics import full_float32
from smallvit.train import cuda_graph, fit_stacked
from smallvit.train.loop import Training
from smallvit.train.stack import Stack

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 40
RUNS = {name: run.vary(steps=STEPS) for name, run in STACKABLE.items()} | {
    "bf16": SHORT.vary(precision="bf16", steps=STEPS),
    "no augmentation": SHORT.vary(augment=(), steps=STEPS),
    "mixup": SHORT.vary(augment=(*augment.digits(), augment.Mixup(), augment.RandomErasing()), steps=STEPS),
    "FixMatch": SHORT.vary(objective=FIXMATCH, steps=STEPS),
    "no clipping, no average": SHORT.vary(clip=0.0, ema=0.0, steps=STEPS),
}
SMALL_DINO = partial(DINO, prototypes=32, hidden=32, freeze=0.0)
VIEWS = WITHOUT_LABELS.vary(objective=SMALL_DINO, augment=augment.digit_crops(), steps=STEPS)
ALONE = RUNS | {
    "dropout": SHORT.vary(block=partial(Block, dropout=0.2), drop_path=0.2, steps=STEPS),
    "DINO": VIEWS,
    "DINO with neighbors": VIEWS.vary(objective=partial(SMALL_DINO, neighbors=3, bank=64, settle=0.0)),
    "DINO with patches": VIEWS.vary(objective=partial(SMALL_DINO, patches=1.0, patch_temp=0.04)),
    "data2vec": WITHOUT_LABELS.vary(objective=Data2Vec, pool=MeanTokens, steps=STEPS),
}


def training(run: Run, seed: int, device: str = "cuda") -> Training:
    data, run = digits(), run.vary(seed=seed)
    made = Training(run, data, data.subset(labels=run.labels, val=run.val, seed=seed), device)
    made.objective.train()
    return made


def steps_of(run: Run, seeds, monkeypatch, graphs: bool):
    """The trainings after STEPS steps, and the `GradientStep` that computed their gradients."""
    monkeypatch.setenv(cuda_graph.SWITCH, str(int(graphs)))
    members = [training(run, seed) for seed in seeds]
    together = Stack(members) if len(seeds) > 1 else members[0]
    for _ in range(STEPS):
        together.train_step()
    return members, together.gradient_step


def assert_same_training(run, seeds, monkeypatch):
    graph, step = steps_of(run, seeds, monkeypatch, graphs=True)
    plain, usual = steps_of(run, seeds, monkeypatch, graphs=False)
    assert step.reason is None and step.graph is not None, step.reason
    assert usual.reason == "SMALLVIT_CUDA_GRAPHS is 0" and usual.graph is None
    for one, other in zip(graph, plain):
        assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-3)
        expected, found = ({name: learned(run, name, p) for name, p in m.model.state_dict().items()} for m in (other, one))
        for name in expected:
            difference = (found[name] - expected[name]).norm()
            assert difference <= 1e-2 * expected[name].norm() + 1e-4, name


def learned(run: Run, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Without labels, AdamW moves two biases by rounding errors alone, because their gradient is 0 in exact arithmetic: that of
    the keys, which softmax ignores, and that of the last LayerNorm, which BatchNorm subtracts. They are left out.
    """
    if not run.reads_labels and name.endswith("qkv.bias"):
        queries, _, values = tensor.double().chunk(3)
        return torch.cat([queries, values])
    return tensor.double() * (run.reads_labels or name != "norm.bias")


@needs_gpu
@pytest.mark.parametrize("run", ALONE.values(), ids=ALONE)
def test_graph_takes_the_same_steps(run, monkeypatch):
    assert_same_training(run, [3], monkeypatch)


@needs_gpu
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_graph_of_a_stack_takes_the_same_steps(run, monkeypatch):
    assert_same_training(run, [3, 1, 4], monkeypatch)


@needs_gpu
@pytest.mark.parametrize("run", [SHORT, distilled(), SHORT.vary(objective=FIXMATCH)], ids=["plain", "distilled", "FixMatch"])
def test_stack_on_a_gpu_learns_like_its_members_alone_on_the_cpu(run, tmp_path):
    runs = [run.vary(steps=STEPS).at_seed(seed) for seed in range(3)]
    cpu = [fit(one, tmp_path / f"cpu{one.seed}") for one in runs]
    gpu = fit_stacked(runs, [tmp_path / f"gpu{one.seed}" for one in runs], device="cuda")
    for one, other in zip(cpu, gpu):
        assert other.finished and other.stacked == 3 and other.device == torch.cuda.get_device_name(0)
        assert other.trace["batches"] == one.trace["batches"]
        assert [point[1] for point in other.curve] == pytest.approx([point[1] for point in one.curve], abs=2e-2)


@needs_gpu
@pytest.mark.parametrize("change", [{"model": SmallCNN}, {"tokenizer": ConvTokenizer}], ids=["CNN", "CCT"])
def test_convolutions_on_larger_images_are_stacked_on_a_gpu(change, tmp_path):
    """In TF32, PyTorch's default for convolutions, a stack would differ from its runs."""
    data = partial(textured_shapes, train=200, test=20)
    runs = [SHORT.vary(data=data, augment=(), **change).at_seed(seed) for seed in range(8)]
    records = fit_stacked(runs, [tmp_path / str(one.seed) for one in runs], device="cuda")
    assert [record.stacked for record in records] == [8] * 8


@needs_gpu
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_model_on_a_gpu_is_exported_and_stays_there(suffix, tmp_path):
    fit(SHORT, tmp_path, device="cuda")
    trained = load(tmp_path)
    trained.model.cuda()
    assert export(trained, tmp_path / f"m{suffix}") <= 1e-5
    assert all(p.is_cuda for p in trained.model.parameters())


@pytest.mark.parametrize("before", [True, False])
def test_training_computes_convolutions_in_float32_and_leaves_the_switch_as_it_was(before, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    seen = []
    fit(SHORT, tmp_path, watch=lambda step, accuracy: seen.append(torch.backends.cudnn.allow_tf32))
    assert seen == [False] * SHORT.steps and torch.backends.cudnn.allow_tf32 is before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="needs the newer switches of PyTorch 2.9")
@pytest.mark.parametrize("wide, narrow", [("none", "none"), ("ieee", "none"), ("tf32", "none"), ("tf32", "tf32"), ("none", "tf32")])
def test_convolutions_are_in_float32_also_with_the_newer_switches_of_pytorch(wide, narrow):
    """A script may set them for everything or for convolutions alone. PyTorch then refuses the older switch."""
    backends, conv = torch.backends, torch.backends.cudnn.conv
    before = backends.fp32_precision, conv.fp32_precision
    try:
        backends.fp32_precision, conv.fp32_precision = wide, narrow
        chosen = conv.fp32_precision
        with full_float32():
            assert conv.fp32_precision == "ieee"
        assert (backends.fp32_precision, conv.fp32_precision) == (wide, chosen)
    finally:
        backends.fp32_precision, conv.fp32_precision = before


@needs_gpu
@pytest.mark.parametrize("stacked", [False, True], ids=["one run", "stack"])
def test_interrupted_training_on_a_gpu_goes_on(stacked, tmp_path, monkeypatch):
    runs = [SHORT.vary(steps=STEPS).at_seed(seed) for seed in range(1 + stacked)]
    whole = fit_stacked(runs, [tmp_path / f"whole{one.seed}" for one in runs], device="cuda")
    folders = [tmp_path / str(one.seed) for one in runs]
    monkeypatch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.0)

    def kill(step, accuracy):
        if step == 25:
            raise Killed

    with pytest.raises(Killed):
        fit_stacked(runs, folders, device="cuda", watch=kill)
    again = fit_stacked(runs, folders, device="cuda")
    for one, other in zip(whole, again):
        assert [point[1] for point in other.curve] == pytest.approx([point[1] for point in one.curve], rel=1e-4)


@needs_gpu
def test_step_that_waits_for_the_gpu_is_computed_as_usual(monkeypatch):
    """The recording fails, and the training goes on."""
    made, usual = training(SHORT.vary(steps=STEPS), 0), training(SHORT.vary(steps=STEPS), 0)
    forward = made.objective.forward
    monkeypatch.setattr(made.objective, "forward", lambda *args: (result := forward(*args), result["loss"].item())[0])
    for _ in range(8):
        made.train_step()
        usual.train_step()
    assert made.gradient_step.graph is None and made.gradient_step.reason and usual.gradient_step.graph is not None
    assert made.loss.item() == pytest.approx(usual.loss.item(), rel=1e-3)


# Reasons against a graph


class Own(torch.nn.Linear):
    """A module of somebody else."""


def reason(run: Run = SHORT, device="cuda", compiled=False, **changes) -> str | None:
    made = training(run.vary(**{"steps": STEPS} | changes), 0, "cpu")
    if isinstance(made.optimizer, SAM):
        return made.reason_against_graph
    return cuda_graph.reason_against(made.objective, torch.device(device), made.run.steps, compiled)


@pytest.mark.parametrize("name", ALONE)
def test_training_can_be_recorded(name):
    assert reason(ALONE[name]) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"device": "cpu"}, "no CUDA device"),
        ({"steps": 12}, "12 steps are too few"),
        ({"compiled": True}, "blocks are compiled"),
        ({"reduction": partial(Prune, keep=0.7)}, "Prune changes during the training"),
        ({"optimizer": SAM}, "SAM computes gradients twice"),
    ],
)
def test_other_training_is_not_recorded(changes, message):
    assert message in reason(**changes)


def test_hooks_a_foreign_module_and_a_switch_prevent_recording(monkeypatch):
    made = training(SHORT.vary(steps=STEPS), 0, "cpu")
    made.objective.model.head = Own(16, 10)
    message = "nothing is known about the steps of test_cuda.Own"
    assert cuda_graph.reason_against(made.objective, torch.device("cuda"), STEPS, False) == message
    made.objective.model.norm.register_forward_hook(lambda *args: None)
    assert cuda_graph.reason_against(made.objective, torch.device("cuda"), STEPS, False) == "LayerNorm has hooks"
    made = training(SHORT.vary(steps=STEPS), 0, "cpu")
    made.objective.model.norm.weight.register_hook(lambda gradient: 2 * gradient)
    assert cuda_graph.reason_against(made.objective, torch.device("cuda"), STEPS, False) == "LayerNorm has hooks"
    made = training(SHORT.vary(steps=STEPS), 0, "cpu")
    made.objective.model.head.forward = lambda x: x
    assert "torch.nn.modules.linear.Linear" in cuda_graph.reason_against(made.objective, torch.device("cuda"), STEPS, False)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert reason() == "all modules have a hook"
    handle.remove()
    monkeypatch.setenv(cuda_graph.SWITCH, "0")
    assert reason() == "SMALLVIT_CUDA_GRAPHS is 0"


@pytest.mark.parametrize(
    "use", [bool, float, int, lambda p: p < 0.5, lambda p: 1 - p, lambda p: p * 2, lambda p: p == 0, lambda p: -p]
)
def test_step_that_depends_on_the_progress_cannot_be_recorded(use):
    with pytest.raises(TypeError):
        use(cuda_graph.Unused())


# Recording, with a graph that runs the code again in place of a GPU


class FakeGraph:
    """What `torch.cuda.CUDAGraph` does, on a CPU: it runs the recorded code again, on the tensors with which it was recorded."""

    recorded = None

    def replay(self):
        fresh = self.recorded()
        for own, new in zip((self.loss, *self.gradients), fresh):
            own.copy_(new)


@pytest.fixture
def fake_graphs(monkeypatch):
    """A GPU for `GradientStep`. Its graphs compute `changed(loss)` as the loss, which is the loss unless a test sets it."""
    options = SimpleNamespace(changed=lambda loss: loss, made=0, progress=lambda: 0.5)

    def compute_and_keep(step, graph):
        def again():
            loss = step.compute(step.batch, options.progress())
            return [options.changed(loss), *(p.grad for p in step.parameters if p.grad is not None)]

        graph.recorded = again

    @contextmanager
    def graph_of(graph, capture_error_mode):
        step = current[0]
        before = [other.clone() for other in step.others]
        yield
        for other, old in zip(step.others, before):  # recording computes nothing
            other.data.copy_(old)
        graph.loss, graph.gradients = step.loss, [p.grad for p in step.parameters if p.grad is not None]
        compute_and_keep(step, graph)
        options.made += 1

    current = []
    record = cuda_graph.GradientStep.record

    def record_here(step, batch, progress):
        current.insert(0, step)
        options.progress = (lambda: 0.5) if isinstance(progress, cuda_graph.Unused) else (lambda: progress)
        record(step, batch, progress)

    monkeypatch.setattr(cuda_graph.GradientStep, "record", record_here)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "CUDAGraph": FakeGraph, "graph": graph_of, "Stream": lambda device: stream, "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(), "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    real = cuda_graph.reason_against
    monkeypatch.setattr(
        "smallvit.train.loop.reason_against",
        lambda objective, device, steps, compiled: real(objective, torch.device("cuda"), steps, compiled),
    )
    return options


def trained(run: Run, seeds, monkeypatch, steps: int = 8, graphs: bool = True):
    monkeypatch.setenv(cuda_graph.SWITCH, str(int(graphs)))
    members = [training(run, seed, "cpu") for seed in seeds]
    together = Stack(members) if len(seeds) > 1 else members[0]
    for _ in range(steps):
        together.train_step()
    return [one.objective.state_dict() for one in members], together.gradient_step


@pytest.mark.parametrize(
    ("name", "seeds"),
    slow_after(2, [
        ("plain", [3]), ("FixMatch", [3, 1]), ("plain", [3, 1]), ("FixMatch", [3]),
        *((name, seeds) for name in ("batch norm", "merge", "no clipping, no average", "MAE") for seeds in ([3], [3, 1])),
        *((name, [3]) for name in ("DINO", "DINO with neighbors", "DINO with patches", "data2vec", "LeJEPA")),
    ]),
)
def test_recorded_steps_are_the_usual_ones(name, seeds, fake_graphs, monkeypatch):
    recorded, step = trained(ALONE[name], seeds, monkeypatch)
    usual, _ = trained(ALONE[name], seeds, monkeypatch, graphs=False)
    assert step.reason is None and fake_graphs.made == 1
    for one, other in zip(recorded, usual):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), "recording changed the weights or the buffers"


def test_recording_that_computes_something_else_is_not_used(fake_graphs, monkeypatch):
    fake_graphs.changed = lambda loss: 1.1 * loss
    recorded, step = trained(RUNS["batch norm"], [3], monkeypatch)
    usual, _ = trained(RUNS["batch norm"], [3], monkeypatch, graphs=False)
    assert step.graph is None and step.reason == "ValueError: the recorded step has another loss or other gradients than the usual one"
    assert all(torch.equal(recorded[0][key], usual[0][key]) for key in usual[0])


def test_step_that_depends_on_the_progress_is_computed_as_usual(fake_graphs, monkeypatch):
    run = RUNS["FixMatch"].vary(objective=partial(FIXMATCH, ramp=0.5))
    recorded, step = trained(run, [3], monkeypatch)
    usual, _ = trained(run, [3], monkeypatch, graphs=False)
    assert step.graph is None and step.reason.startswith("TypeError")
    assert all(torch.equal(recorded[0][key], usual[0][key]) for key in usual[0])


def test_step_is_recorded_again_when_it_changes_with_the_progress(fake_graphs, monkeypatch):
    """In the 20 steps, DINO's temperature rises in each of the first 6, and its last layer is frozen in the first 11."""
    run = VIEWS.vary(objective=partial(SMALL_DINO, freeze=0.275, warm_temp=0.02, warmup=0.15))
    recorded, step = trained(run, [3], monkeypatch, steps=20)
    usual, _ = trained(run, [3], monkeypatch, steps=20, graphs=False)
    assert step.reason is None and fake_graphs.made == 2
    assert all(torch.equal(recorded[0][key], usual[0][key]) for key in usual[0])


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand], ids=["torch", "Python", "NumPy"])
def test_step_that_draws_on_the_cpu_is_computed_as_usual(draw, fake_graphs, monkeypatch):
    made = training(RUNS["plain"], 3, "cpu")
    compute = made.gradient_step.compute
    made.gradient_step.compute = lambda batch, progress: compute(batch, progress) * (1 + 0 * float(draw()))
    for _ in range(5):
        made.train_step()
    assert made.gradient_step.graph is None
    assert made.gradient_step.reason == "ValueError: the step draws random numbers on the CPU"


def test_batch_of_another_shape_is_computed_as_usual(fake_graphs, monkeypatch):
    made = training(RUNS["plain"], 3, "cpu")
    for _ in range(5):
        made.train_step()
    batch = made.next_batch()
    half = batch._replace(images=batch.images[:4], targets=batch.targets[:4])
    loss = made.gradient_step(half, 0.5)
    expected = made.gradient_step.compute(half, 0.5)
    assert made.gradient_step.graph is not None and torch.equal(loss, expected)


def test_step_is_recorded_again_if_a_tensor_has_moved(fake_graphs, monkeypatch):
    made = training(RUNS["plain"], 3, "cpu")
    usual, _ = trained(RUNS["plain"], [3], monkeypatch, graphs=False)
    monkeypatch.setenv(cuda_graph.SWITCH, "1")
    for step in range(8):
        if step == 6:
            weight = made.objective.model.head.weight
            weight.data = weight.detach().clone()
        made.train_step()
    assert fake_graphs.made == 2
    assert all(torch.equal(made.objective.state_dict()[key], usual[0][key]) for key in usual[0])
