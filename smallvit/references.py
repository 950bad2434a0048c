"""Reference models, for orientation beside a Vision Transformer: raw pixels, a small CNN, LeNet-5 and the ResNets of timm.

They are called like a ViT, `model(image, channels, classes)`, and have the same method `features`.
"""

from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from smallvit.convolution import BatchNorm2d, Conv2d, MaxPool2d
from smallvit.random_weights import initialize


class Pixels(nn.Module):
    """A model without a network, for comparison with trained models. Its features are the raw pixels of the image. The model
    gives no logits, so evaluate it with nearest neighbors (`knn`) or a linear probe.
    """

    def __init__(self, image: tuple[int, int], channels: int, classes: int):
        super().__init__()

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("raw pixels give no logits; evaluate them with knn or linear_probe instead of accuracy")


class SmallCNN(nn.Module):
    """A small convolutional network (CNN), for comparison with a Vision Transformer. It has four 3x3 convolutions with
    BatchNorm and ReLU, two max-poolings, one hidden layer and a linear head.

    `width` is the number of channels of the first two convolutions (the others have twice as many), `hidden` the width of the
    hidden layer. With 28 x 28 pixels, ten classes and the defaults it has about 118,000 parameters.

    Source   LeNet-5 (LeCun et al. 1998) for the plan and the size; the layers are those of today.
    Raises   ValueError for images under 4 pixels a side, or images of another shape than it was built for.
    """

    def __init__(self, image: tuple[int, int], channels: int, classes: int, *, width: int = 16, hidden: int = 64):
        super().__init__()
        if min(image) < 4:
            raise ValueError(f"image {image[0]} x {image[1]} is too small for two poolings; expected at least 4 x 4")
        self.image = (channels, *image)
        layers, inputs = nn.Sequential(), channels
        for outputs in (width, 2 * width):
            for _ in range(2):
                layers.extend([Conv2d(inputs, outputs, 3, padding=1, bias=False), BatchNorm2d(outputs), nn.ReLU()])
                inputs = outputs
            layers.insert(-1, MaxPool2d(2))  # before the ReLU: the same result with fewer values to compute
        size = 2 * width * (image[0] // 4) * (image[1] // 4)
        self.body = layers.extend([nn.Flatten(), nn.Linear(size, hidden), nn.ReLU()])
        self.head = nn.Linear(hidden, classes)
        initialize(self)

    def features(self, x: Tensor) -> Tensor:
        return self.body(check_shape(x, self.image))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class LeNet(nn.Module):
    """LeNet-5, the classical CNN for digits, for comparison with a Vision Transformer. It has two 5x5 convolutions, each with a
    pooling, then hidden layers of 120 and 84 units, and a linear head.

    `activation` is "tanh" or "relu", `pooling` "average" or "max"; many use "relu" and "max" today.

    Paper    LeCun et al. 1998, Gradient-based learning applied to document recognition, section II.B. 28 x 28 pixels:
             61,706 parameters for ten classes.
    Departs  As usually written today: images are padded by two pixels of zeros (the paper's are 32 wide); all maps of the
             second convolution see all maps of the first (the paper's table omits some); tanh is not scaled; a pooling has no
             coefficient, bias or activation of its own; the last layer is linear instead of radial basis functions; weights are
             initialized as in `SmallCNN`.
    Raises   ValueError for images under 12 pixels a side, or images of another shape than it was built for.
    """

    def __init__(
        self, image: tuple[int, int], channels: int, classes: int, *, activation: str = "tanh", pooling: str = "average"
    ):
        super().__init__()
        for name, value, table in (("activation", activation, ACTIVATIONS), ("pooling", pooling, POOLINGS)):
            if value not in table:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, table))}")
        if min(image) < 12:
            raise ValueError(f"image {image[0]} x {image[1]} is too small for two 5x5 convolutions; expected at least 12 x 12")
        self.image = (channels, *image)
        act, pool = ACTIVATIONS[activation], POOLINGS[pooling]
        rows, columns = ((side // 2 - 4) // 2 for side in image)
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, 6, 5, padding=2), act(), pool(2)),
            *(nn.Conv2d(6, 16, 5), act(), pool(2), nn.Flatten()),
            *(nn.Linear(16 * rows * columns, 120), act(), nn.Linear(120, 84), act()),
        )
        self.head = nn.Linear(84, classes)
        initialize(self)

    def features(self, x: Tensor) -> Tensor:
        return self.body(check_shape(x, self.image))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
POOLINGS = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}


class ResNet(nn.Module):
    """A residual network (ResNet) of timm with random initial weights, for comparison with a Vision Transformer.

    `name` is the model's name in timm, any of `timm.list_models(module="resnet")`. With `small_stem`, images with a side under
    64 pixels pass one 3x3 convolution with stride 1 and no pooling before the first stage. Images of any size work, except 28 x
    28 with timm's anti-aliased models (`resnetaa*`), since 28 cannot be halved often enough.

    Paper    He et al. 2015, arXiv:1512.03385; section 4.2 uses such a small stem for CIFAR. Weights are drawn as in timm.
    Departs  timm's own stem, a 7x7 convolution and a pooling, would leave a quarter of each side. Larger images, and
             `small_stem=False`, use it.
    Raises   ValueError for a name that timm does not have, with the nearest names, and for images with another number of
             channels.
    """

    def __init__(
        self, image: tuple[int, int], channels: int, classes: int, *, name: str = "resnet18", small_stem: bool = True
    ):
        super().__init__()
        import timm

        names = timm.list_models(module="resnet")
        if name not in names:
            near = get_close_matches(name, names, 3, 0.5) or ["resnet18", "resnet34", "resnet50"]
            raise ValueError(f"timm has no ResNet {name!r}; expected one of its names, such as {', '.join(near)}")
        self.channels = channels
        self.body: Any = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=0)
        if small_stem and min(image) < 64:
            width = len(self.body.bn1.weight)
            self.body.conv1, self.body.maxpool = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.Identity()
            nn.init.kaiming_normal_(self.body.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.head = nn.Linear(self.body.num_features, classes)

    def features(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(f"got images of shape {tuple(x.shape)}; this CNN needs b {self.channels} h w")
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def check_shape(x: Tensor, image: tuple[int, ...]) -> Tensor:
    """Return the images `x` unchanged if each image has the shape `image`, which is (channels, height, width). Otherwise raise
    ValueError.
    """
    if x.shape[1:] != image:
        raise ValueError(f"got images of shape {tuple(x.shape)}; expected {image} each, as this CNN was built for one size")
    return x
