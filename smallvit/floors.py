"""Floors: what a Vision Transformer has to beat. Raw pixels, and a small CNN.

They are called as a ViT is, `model(image, channels, classes)`, and offer the same `features`.
"""

import torch
from torch import Tensor, nn

from smallvit.vit import initialise


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
        initialise(self)

    def features(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.image:
            raise ValueError(
                f"got images of shape {tuple(x.shape)}; expected {self.image} each, as this CNN was built for one size"
            )
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
