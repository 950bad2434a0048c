"""References: what a Vision Transformer has to beat. Raw pixels, a small CNN, LeNet-5 and the ResNets.

They are called as a ViT is, `model(image, channels, classes)`, and offer the same `features`.
"""

from difflib import get_close_matches

import torch
from torch import Tensor, nn

from smallvit.vit import initialize


class Pixels(nn.Module):
    """Nothing at all: the feature is the pixels, h w c of them. For evaluators that bring their own classifier."""

    def __init__(self, image: tuple[int, int], channels: int, classes: int):
        super().__init__()

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("raw pixels give no logits; evaluate them with knn or linear_probe instead of accuracy")


class SmallCNN(nn.Module):
    """A CNN of LeNet's size with today's parts: at each of two scales two 3x3 convolutions and a pooling, then a hidden layer.

    Source   LeNet-5 (LeCun et al. 1998) for the plan; BatchNorm and ReLU for the parts. 28 x 28 pixels, width 16: 120,000
             parameters.
    Raises   ValueError for images under 4 pixels a side, or of another shape than it was built for.
    """

    def __init__(self, image: tuple[int, int], channels: int, classes: int, *, width: int = 16, hidden: int = 64):
        super().__init__()
        if min(image) < 4:
            raise ValueError(f"image {image[0]} x {image[1]} is too small for two poolings; expected at least 4 x 4")
        self.image = (channels, *image)
        layers: list[nn.Module] = []
        for before, after, pool in (
            (channels, width, False),
            (width, width, True),
            (width, 2 * width, False),
            (2 * width, 2 * width, True),
        ):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if pool else []
        with torch.no_grad():
            size = nn.Sequential(*layers)(torch.zeros(2, channels, *image)).flatten(1).shape[1]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)
        initialize(self)

    def features(self, x: Tensor) -> Tensor:
        return self.body(fitting(x, self.image))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class LeNet(nn.Module):
    """LeNet-5, the CNN that digits were first read with: two 5x5 convolutions, each with a pooling, then 120 and 84 units.

    Paper    LeCun et al. 1998, Gradient-based learning applied to document recognition, section II.B. 28 x 28 pixels:
             61,706 parameters for ten classes.
    Departs  As it is usually written today: two pixels of zeros around an image (the paper's are 32 wide), all maps of the
             second convolution see all of the first (the paper's table leaves some out), tanh is not scaled, a pooling has no
             coefficient, bias or squashing of its own, the last layer is linear instead of radial basis functions, and weights
             start as a `SmallCNN`'s. `activation="relu"` and `pooling="max"` are what many take instead.
    Raises   ValueError for images under 12 pixels a side, or of another shape than it was built for.
    """

    def __init__(
        self,
        image: tuple[int, int],
        channels: int,
        classes: int,
        *,
        activation: str = "tanh",
        pooling: str = "average",
    ):
        super().__init__()
        for name, value, table in (("activation", activation, ACTIVATIONS), ("pooling", pooling, POOLINGS)):
            if value not in table:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, table))}")
        if min(image) < 12:
            raise ValueError(f"image {image[0]} x {image[1]} is too small for two 5x5 convolutions; expected at least 12 x 12")
        self.image = (channels, *image)
        squash, pool = ACTIVATIONS[activation], POOLINGS[pooling]
        rows, columns = ((side // 2 - 4) // 2 for side in image)
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, 6, 5, padding=2), squash(), pool(2)),
            *(nn.Conv2d(6, 16, 5), squash(), pool(2), nn.Flatten()),
            *(nn.Linear(16 * rows * columns, 120), squash(), nn.Linear(120, 84), squash()),
        )
        self.head = nn.Linear(84, classes)
        initialize(self)

    def features(self, x: Tensor) -> Tensor:
        return self.body(fitting(x, self.image))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
POOLINGS = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


class ResNet(nn.Module):
    """A residual network as timm makes it, by its name there, with random weights: the CNN that most papers compare with.

    Paper    He et al. 2015, arXiv:1512.03385. `name` is any of `timm.list_models(module="resnet")`. All else that knows a name
             of timm's stands in `pretrained`; this network is taken whole, and timm imported where it is made.
    Departs  With `small_stem`, images with a side under 64 pixels go through one 3x3 convolution at stride 1 and no pooling
             before the first stage, as the paper's own for CIFAR do (section 4.2); timm's 7x7 convolution and pooling would
             leave a quarter of each side. Larger images, and `small_stem=False`, have timm's stem.

    Takes images of any size, but timm's anti-aliased ones (`resnetaa*`) none of 28 x 28, which does not halve often enough.
    Weights are drawn as timm draws them, those of the small stem too.

    Raises   ValueError for a name that timm does not have, naming the nearest, and for another number of channels.
    """

    def __init__(
        self,
        image: tuple[int, int],
        channels: int,
        classes: int,
        *,
        name: str = "resnet18",
        small_stem: bool = True,
    ):
        super().__init__()
        import timm

        names = timm.list_models(module="resnet")
        if name not in names:
            near = get_close_matches(name, names, 3, 0.5) or ["resnet18", "resnet34", "resnet50"]
            raise ValueError(f"timm has no ResNet {name!r}; expected one of its names, such as {', '.join(near)}")
        self.channels = channels
        self.body = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=0)
        if small_stem and min(image) < 64:
            width = len(self.body.bn1.weight)
            self.body.conv1, self.body.maxpool = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
            nn.init.kaiming_normal_(self.body.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.head = nn.Linear(self.body.num_features, classes)

    def features(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(
                f"got images of shape {tuple(x.shape)}; expected b {self.channels} h w, the channels this CNN was built for"
            )
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def fitting(x: Tensor, image: tuple[int, ...]) -> Tensor:
    """The images, if they are of the shape that a model was built for."""
    if x.shape[1:] != image:
        raise ValueError(f"got images of shape {tuple(x.shape)}; expected {image} each, as this CNN was built for one size")
    return x
