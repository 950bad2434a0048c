"""How the other libraries ("peers") do each task, written as in their documentation, with default settings or best flags.

Best flags are settings that a user can change in one line: on a CPU no fused attention in timm, which is slow for few tokens;
the fused AdamW of torch; bf16 autocast if the processor supports bf16; worker processes that prepare batches during training.
torch.compile is not among them, because it takes minutes to compile.

Each function imports its peer itself, so a peer that is not installed affects only its own lines of the table.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from benchmarks.digits import dataset, first_batch, splits
from smallvit import Dataset
from smallvit.augment import MultiCrop
from smallvit.launch import cores

TEST_BATCH = 500
PEERS = ("timm", "vit-pytorch", "torchvision", "kornia", "lightly")


class Shape(NamedTuple):
    """The shape of a ViT with a class token, and its batch size."""

    dim: int
    depth: int
    heads: int
    batch: int
    patch: int = 4
    mlp_ratio: float = 4.0


def version(peer: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return version_of(peer)
    except PackageNotFoundError:
        return None


@functools.cache
def has_native_bf16(device: str = "cpu") -> bool:
    """Return whether the processor supports bf16 in hardware; without this support bf16 is slower than float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(flag in flags.read_text() for flag in ("avx512_bf16", "amx_bf16"))


def autocast(best: bool, device: str = "cpu", bf16: bool = True) -> torch.autocast:
    """Return the autocast context: bf16 for best flags if the hardware supports it and `bf16` allows it, else float32."""
    return torch.autocast(device, torch.bfloat16, enabled=best and bf16 and has_native_bf16(device))


def adamw(model: nn.Module, best: bool) -> torch.optim.AdamW:
    """Return AdamW for the trained parameters of a model; the fused version for best flags."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.05, fused=True if best else None)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use this number of torch threads inside the `with` statement."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Models


def timm_vit(shape: Shape, side: int, channels: int, best: bool) -> nn.Module:
    """Return timm's ViT for square images and 10 classes; best flags switch off its fused attention."""
    from timm.layers import set_fused_attn, use_fused_attn
    from timm.models import VisionTransformer

    before = use_fused_attn()
    set_fused_attn(not best)
    try:
        return VisionTransformer(
            img_size=side,
            patch_size=shape.patch,
            in_chans=channels,
            num_classes=10,
            embed_dim=shape.dim,
            depth=shape.depth,
            num_heads=shape.heads,
            mlp_ratio=shape.mlp_ratio,
        )
    finally:
        set_fused_attn(before)


def vit_pytorch_vit(shape: Shape, side: int, channels: int, best: bool) -> nn.Module:
    """Return the ViT of vit-pytorch, with heads as wide as in the other libraries (its default is 64). It has no flags."""
    from vit_pytorch import ViT

    return ViT(
        image_size=side,
        patch_size=shape.patch,
        channels=channels,
        num_classes=10,
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        dim_head=shape.dim // shape.heads,
        mlp_dim=int(shape.dim * shape.mlp_ratio),
    )


VITS = {"timm": timm_vit, "vit-pytorch": vit_pytorch_vit}


def step(
    shape: Shape, peer: str, best: bool, bf16: bool = True, device: str = "cpu", compiled: bool = False
) -> Callable[[], None]:  # fmt: skip
    """Return a call that makes one training step, always on the same batch. `bf16=False` leaves bf16 out of the best flags.
    `compiled` compiles the model with torch.compile, and records CUDA graphs (`mode="reduce-overhead"`).
    """
    data = dataset()
    model = VITS[peer](shape, data.spec.size[0], data.spec.channels, best and device == "cpu").to(device)
    model = torch.compile(model, mode="reduce-overhead") if compiled else model
    batch = (part.to(device) for part in first_batch(data, shape.batch))
    return partial(learn, model, adamw(model, best), *batch, best, bf16)


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, best: bool, bf16: bool = True
):  # fmt: skip
    """Make one training step: forward, cross-entropy, backward, gradient clipping, AdamW."""
    with autocast(best, images.device.type, bf16):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def inference(shape: Shape, peer: str, best: bool, bf16: bool = True) -> Callable[[], Tensor]:
    """Return a call that computes the logits of one batch."""
    data = dataset()
    model = VITS[peer](shape, data.spec.size[0], data.spec.channels, best)
    return partial(predict, model.eval(), first_batch(data, shape.batch)[0], best and bf16)


def predict(model: nn.Module, images: Tensor, best: bool = False) -> Tensor:
    """Return the logits of images, without gradients."""
    with torch.inference_mode(), autocast(best, images.device.type):
        return model(images)


# Augmentation, as strong as augment.digits(): displacements of about one pixel, equally smooth


def torchvision_warp() -> list[Callable]:
    """Return torchvision's affine and elastic transforms."""
    from torchvision.transforms import v2

    bilinear = v2.InterpolationMode.BILINEAR
    affine = v2.RandomAffine(15, translate=(0.07, 0.07), scale=(1 / 1.15, 1.15), shear=12, interpolation=bilinear)
    return [affine, v2.ElasticTransform(alpha=54.0, sigma=4.0)]


def torchvision_augmentation() -> Callable[[Tensor], Tensor]:
    """Return torchvision's transforms, applied image by image: for a whole batch torchvision makes only one random draw."""
    from torchvision.transforms import v2

    transform = v2.Compose([*torchvision_warp(), v2.RandomErasing(p=0.25)])
    return lambda images: torch.stack([transform(image) for image in images])


def kornia_augmentation() -> Callable[[Tensor], Tensor]:
    """Return kornia's transforms, which take a whole batch and draw for each image."""
    from kornia import augmentation as kornia

    return nn.Sequential(
        kornia.RandomAffine(15, translate=(0.07, 0.07), scale=(1 / 1.15, 1.15), shear=12, p=1.0),
        kornia.RandomElasticTransform(kernel_size=(33, 33), sigma=(4.0, 4.0), alpha=(1.9, 1.9), p=1.0),
        kornia.RandomErasing(scale=(0.02, 0.33), ratio=(0.3, 3.3), p=0.25),
    )


AUGMENTATIONS = {"torchvision": torchvision_augmentation, "kornia": kornia_augmentation}


# DINO


def views(data: Dataset, crops: Sequence[MultiCrop], batch: int) -> Callable[[], list[Tensor]]:
    """Return a call that makes lightly's normalized views from PIL images, one tensor per view.

    Number, size and area of the crops are those of smallvit. The other transforms are lightly's: it has none for digits and
    flips, blurs and solarizes images, where smallvit warps digits.
    """
    from lightly.transforms import DINOTransform
    from torchvision.transforms.functional import to_pil_image

    (crop,) = crops
    transform = DINOTransform(
        global_crop_size=data.spec.size[0],
        global_crop_scale=crop.first[0].crop,
        local_crop_size=crop.small[0].size,
        local_crop_scale=crop.small[0].crop,
        n_local_views=crop.local,
        normalize={"mean": data.spec.mean, "std": data.spec.std},
    )
    pictures = [to_pil_image(image) for image in data.train.images[:batch]]
    return lambda: [torch.stack(views) for views in zip(*map(transform, pictures))]


class LightlyDINO(nn.Module):
    """DINO made of lightly's parts: student and teacher with a projection head each, and the loss. Heads have our size."""

    def __init__(self, backbone: nn.Module, width: int):
        super().__init__()
        from lightly.loss import DINOLoss
        from lightly.models.modules import DINOProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        head = partial(DINOProjectionHead, width, 256, 64, 1024, batch_norm=True, freeze_last_layer=1)
        self.student, self.student_head = backbone, head()
        self.teacher, self.teacher_head = copy.deepcopy(backbone), head()
        deactivate_requires_grad(self.teacher)
        deactivate_requires_grad(self.teacher_head)
        self.loss = DINOLoss(output_dim=1024)

    def forward(self, views: list[Tensor]) -> Tensor:
        """Return the loss; the first two views are the global ones."""
        teacher = [self.teacher_head(self.teacher.features(view)) for view in views[:2]]
        student = [self.student_head(self.student.features(view)) for view in views]
        return self.loss(teacher, student, epoch=0)


def dino(
    model: LightlyDINO, make_views: Callable[[], list[Tensor]], best: bool, bf16: bool = True
) -> Callable[[], None]:  # fmt: skip
    """Return a call that makes one step: views, update of the teacher, forward, backward, AdamW."""
    from lightly.models.utils import update_momentum

    optimizer = adamw(model, best)

    def step():
        views = make_views()
        update_momentum(model.student, model.teacher, m=0.99)
        update_momentum(model.student_head, model.teacher_head, m=0.99)
        with autocast(best, bf16=bf16):
            loss = model(views)
        optimizer.zero_grad()
        loss.backward()
        model.student_head.cancel_last_layer_gradients(current_epoch=0)
        optimizer.step()

    return step


# A whole recipe


class PILImages(TorchDataset):
    """A data set like those of torchvision: it transforms one PIL image at a time, when the image is read."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Callable):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def pil_images(images: np.ndarray, labels: np.ndarray, warp: bool) -> PILImages:
    """Return a data set of digits that makes normalized tensors of them, and with `warp` also deforms them."""
    from torchvision.transforms import v2

    to_input = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.0], [0.3])]
    return PILImages(images, labels, v2.Compose([*(torchvision_warp() if warp else ()), *to_input]))


def runs(shape: Shape, number: int, steps: int, labels: int, device: str, best: bool):
    """Train and test ViTs of timm one after another, with torchvision's transforms and torch's DataLoader.

    With default settings torch uses all cores, and batches are made between the steps. With best flags half of the cores make
    batches in parallel.
    """
    (images, targets), test = splits(28).values()
    train, workers = (images[:labels], targets[:labels]), cores() // 2 if best else 0
    with threads(cores() - workers):
        for seed in range(number):
            make = partial(timm_vit, shape, 28, 1, best and device == "cpu")
            run(make, seed, steps, shape.batch, train, test, best, device, workers)


def run(
    make: Callable[[], nn.Module], seed: int, steps: int, batch: int, train: Sequence, test: Sequence, best: bool,
    device: str = "cpu", workers: int = 0,
) -> float:  # fmt: skip
    """Train the model `make()` on deformed digits and return its accuracy on test digits, in a loop like that of timm's
    `train.py`. `train` and `test` are pairs of images and labels, and `workers` processes prepare the batches.
    """
    torch.manual_seed(seed)
    model = make().to(device)
    optimizer, options = adamw(model, best), {"num_workers": workers, "persistent_workers": True} if workers else {}
    loader = DataLoader(pil_images(*train, warp=True), batch, shuffle=True, drop_last=True, **options)
    for inputs in islice(repeat(loader), steps):
        learn(model, optimizer, *(part.to(device) for part in inputs), best)
    correct = 0.0
    for images, labels in DataLoader(pil_images(*test, warp=False), TEST_BATCH):
        correct += len(labels) * accuracy(model.eval(), images.to(device), labels.to(device), best)
    return correct / len(test[1])


def repeat(loader: DataLoader) -> Iterator:
    """Yield the batches of endless epochs."""
    while True:
        yield from loader


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, best: bool) -> float:
    """Return the share of correct predictions."""
    return (predict(model, images, best).argmax(1) == labels).float().mean().item()
