"""How the peers do it: their models and loops as their own documentation writes them, as shipped and with their best flags.

Best flags are what a user changes in a line: on a CPU timm's fused attention off, which is slow for few tokens; torch's fused
AdamW; bf16 autocast where the processor multiplies bf16 itself; workers that make the batches while the model learns. Not among
them is what takes more than a flag, such as torch.compile with its minute of compiling.

A peer is imported by the function that uses it, so that one that is not installed costs its own lines alone.
"""

import copy
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

from benchmarks.digits import batch_of, dataset, splits
from smallvit import Dataset
from smallvit.augment import MultiCrop
from smallvit.launch import cores

PEERS = ("timm", "vit-pytorch", "torchvision", "kornia", "lightly")


class Shape(NamedTuple):
    """A ViT with a class token, and how many images it is given at once."""

    dim: int
    depth: int
    heads: int
    batch: int
    patch: int = 4
    mlp_ratio: float = 4.0


def version(peer: str) -> str | None:
    """None where it is not installed."""
    try:
        return version_of(peer)
    except PackageNotFoundError:
        return None


def native_bf16(device: str = "cpu") -> bool:
    """Whether the processor multiplies bf16 itself; where it does not, bf16 is slower than float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(flag in flags.read_text() for flag in ("avx512_bf16", "amx_bf16"))


def autocast(best: bool, device: str = "cpu") -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=best and native_bf16(device))


def adamw(model: nn.Module, best: bool) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.05, fused=True if best else None)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """As many torch threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Models


def timm_vit(shape: Shape, side: int, channels: int, best: bool) -> nn.Module:
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
    """Its heads are 64 wide unless told: here as wide as everybody's. It has no other attention to choose."""
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


def step(shape: Shape, peer: str, best: bool) -> Callable[[], None]:
    """One step of training, the same batch each time."""
    data = dataset()
    model = VITS[peer](shape, data.spec.size[0], data.spec.channels, best)
    return partial(learn, model, adamw(model, best), *batch_of(data, shape.batch), best)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, best: bool):
    """Forward, cross-entropy, backward, clip, AdamW."""
    with autocast(best, images.device.type):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def inference(shape: Shape, peer: str, best: bool) -> Callable[[], Tensor]:
    """The logits of one batch."""
    data = dataset()
    model = VITS[peer](shape, data.spec.size[0], data.spec.channels, best)
    return partial(predict, model.eval(), batch_of(data, shape.batch)[0], best)


def predict(model: nn.Module, images: Tensor, best: bool = False) -> Tensor:
    with torch.inference_mode(), autocast(best, images.device.type):
        return model(images)


# Augmentation, as strong as augment.digits(): displacements are as smooth, and about one pixel


def torchvision_warp() -> list[Callable]:
    from torchvision.transforms import v2

    bilinear = v2.InterpolationMode.BILINEAR
    affine = v2.RandomAffine(15, translate=(0.07, 0.07), scale=(1 / 1.15, 1.15), shear=12, interpolation=bilinear)
    return [affine, v2.ElasticTransform(alpha=54.0, sigma=4.0)]


def torchvision_augmentation() -> Callable[[Tensor], Tensor]:
    """Image by image: for a whole batch torchvision draws once, and all images move alike."""
    from torchvision.transforms import v2

    change = v2.Compose([*torchvision_warp(), v2.RandomErasing(p=0.25)])
    return lambda images: torch.stack([change(image) for image in images])


def kornia_augmentation() -> Callable[[Tensor], Tensor]:
    """The whole batch at once, each image its own draw."""
    from kornia import augmentation as kornia

    return nn.Sequential(
        kornia.RandomAffine(15, translate=(0.07, 0.07), scale=(1 / 1.15, 1.15), shear=12, p=1.0),
        kornia.RandomElasticTransform(kernel_size=(33, 33), sigma=(4.0, 4.0), alpha=(1.9, 1.9), p=1.0),
        kornia.RandomErasing(scale=(0.02, 0.33), ratio=(0.3, 3.3), p=0.25),
    )


AUGMENTATIONS = {"torchvision": torchvision_augmentation, "kornia": kornia_augmentation}


# DINO


def views(data: Dataset, steps: Sequence[MultiCrop], batch: int) -> Callable[[], list[Tensor]]:
    """Normalised, view after view, each made of PIL images: as many as ours, in windows of the same sizes and areas.

    What else is done to an image is lightly's own: it has nothing for digits, and flips, blurs and solarises what ours bend.
    """
    from lightly.transforms import DINOTransform
    from torchvision.transforms.functional import to_pil_image

    (looks,) = steps
    transform = DINOTransform(
        global_crop_size=data.spec.size[0],
        global_crop_scale=looks.first[0].crop,
        local_crop_size=looks.small[0].size,
        local_crop_scale=looks.small[0].crop,
        n_local_views=looks.local,
        normalize={"mean": data.spec.mean, "std": data.spec.std},
    )
    pictures = [to_pil_image(image) for image in data.train.images[:batch]]
    return lambda: [torch.stack(views) for views in zip(*map(transform, pictures))]


class LightlyDINO(nn.Module):
    """DINO put together from lightly's parts: student, teacher, a head each, the loss. The head has the size of ours."""

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
        wanted = [self.teacher_head(self.teacher.features(view)) for view in views[:2]]
        said = [self.student_head(self.student.features(view)) for view in views]
        return self.loss(wanted, said, epoch=0)


def dino(model: LightlyDINO, look: Callable[[], list[Tensor]], best: bool) -> Callable[[], None]:
    """One step: views, momentum, forward, backward, AdamW."""
    from lightly.models.utils import update_momentum

    optimizer = adamw(model, best)

    def one():
        views = look()
        update_momentum(model.student, model.teacher, m=0.99)
        update_momentum(model.student_head, model.teacher_head, m=0.99)
        with autocast(best):
            loss = model(views)
        optimizer.zero_grad()
        loss.backward()
        model.student_head.cancel_last_layer_gradients(current_epoch=0)
        optimizer.step()

    return one


# A whole recipe


class Pictures(TorchDataset):
    """Images as torchvision's data sets give them: one at a time, from a PIL image, transformed when it is asked for."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Callable):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[at])), int(self.labels[at])


def runs(shape: Shape, number: int, steps: int, labels: int, device: str, best: bool):
    """ViTs of timm on torchvision's transforms and torch's DataLoader, trained and tested one after another.

    As shipped torch computes on all cores and the loader makes its batches in between; at its best half of the cores make them.
    """
    from torchvision.transforms import v2

    (images, known), test = splits(28).values()
    plain = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.0], [0.3])]
    learned = Pictures(images[:labels], known[:labels], v2.Compose([*torchvision_warp(), *plain]))
    unseen = DataLoader(Pictures(*test, v2.Compose(plain)), len(test[1]))
    workers = cores() // 2 if best else 0
    more = {"num_workers": workers, "persistent_workers": True} if workers else {}
    with threads(cores() - workers):
        for seed in range(number):
            torch.manual_seed(seed)
            model = timm_vit(shape, 28, 1, best and device == "cpu").to(device)
            optimizer = adamw(model, best)
            batches = forever(DataLoader(learned, shape.batch, shuffle=True, drop_last=True, **more))
            for batch in islice(batches, steps):
                learn(model, optimizer, *(part.to(device) for part in batch), best)
            for batch in unseen:
                accuracy(model.eval(), *(part.to(device) for part in batch), best)


def forever(loader: DataLoader) -> Iterator:
    """Epoch after epoch."""
    while True:
        yield from loader


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, best: bool) -> float:
    return (predict(model, images, best).argmax(1) == labels).float().mean().item()
