"""Parts of DINO: the projection head, the bank of similar images, and the patch term of iBOT."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.attention import at_least_float32
from smallvit.augment.batch import upload

from .mae import pixels_of_patches

MASKED_VIEWS = 0.5  # of the global views of the student, for the patch term


def projection_head(
    inputs: int, layers: int, *, hidden: int, bottleneck: int, prototypes: int, batch_norm: bool, norm_last_layer: bool
) -> Any:
    """Return a new projection head (a module) of DINO, which is lightly's. `inputs` is the width of the features, and `layers`
    is the number of linear layers before the prototypes, 1 or 3. The other options are those of `DINO`.
    """
    from lightly.models.modules import DINOProjectionHead

    with warnings.catch_warnings():  # lightly calls a function of torch that will be removed, which no user can change
        warnings.filterwarnings("ignore", ".*weight_norm.* is deprecated", FutureWarning)
        head: Any = DINOProjectionHead(
            inputs, hidden, bottleneck, prototypes, batch_norm, freeze_last_layer=1, norm_last_layer=norm_last_layer
        )
    if layers == 1:
        linear = nn.Linear(inputs, bottleneck)
        head.layers = nn.Sequential(linear)
        nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
    return head


def student_and_teacher(make_head: Callable[[], Any]) -> tuple[Any, Any]:
    """Return two equal projection heads, that of the student and that of the teacher, which is not trained. `make_head` makes
    one: a head with weight norm cannot be deep-copied.
    """
    student, teacher = make_head(), make_head().requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    return student, teacher


class NeighborBank(nn.Module):
    """The teacher's features of the last `size` images, in which similar images are found.

    features     (size, width), of length 1, by which images are compared
    projections  (size, bottleneck), of length 1: the features after the hidden layers of the teacher's head
    ids          (size), a hash of each image
    count        the number of images that were put into the bank so far

    `neighbors` is the number of similar images for each image, and `share` the weight of their targets.
    """

    features: Tensor
    projections: Tensor
    ids: Tensor
    count: Tensor

    def __init__(self, size: int, width: int, bottleneck: int, neighbors: int, share: float):
        super().__init__()
        self.neighbors, self.share = neighbors, share
        self.register_buffer("features", torch.zeros(size, width))
        self.register_buffer("projections", torch.zeros(size, bottleneck))
        self.register_buffer("ids", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def nearest(self, feature: Tensor, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the projections of the images in the bank whose features are nearest, shape (batch, neighbors, bottleneck),
        and which of them are valid, shape (batch, neighbors). `feature` (batch, width) and `ids` (batch) belong to new images;
        no image is its own neighbor. Return None while the bank has too few images; on a GPU, no neighbor is valid then.
        """
        size, on_gpu = len(self.features), self.count.is_cuda  # to read a number from a GPU is to wait for it
        filled = size if on_gpu else min(int(self.count), size)
        if filled < self.neighbors:
            return None
        with torch.autocast(feature.device.type, enabled=False):  # half precision would find other neighbors
            similarity = feature @ self.features[:filled].to(feature).T
        empty = torch.arange(filled, device=ids.device) >= self.count
        similarity.masked_fill_(empty | (ids[:, None] == self.ids[:filled]), -torch.inf)
        values, index = similarity.topk(self.neighbors, dim=1)
        valid = values.isfinite()
        return (self.projections[index], valid) if on_gpu or bool(valid.any()) else None

    def mix(self, logits: Tensor, theirs: Tensor, valid: Tensor, center: Tensor, temperature: float) -> Tensor:
        """Average the teacher's target for each image with its mean target for similar images (neighbors). A target is
        softmax((logits - center) / temperature); the mean is converted back to logits, which are returned. `logits` (2 batch,
        prototypes) belong to two views of the images, and `theirs` (batch, neighbors, prototypes) to the neighbors, of which
        those with `valid` (batch, neighbors) False are ignored.

        The neighbors have the weight `share`. An image without valid neighbors keeps its own target.
        """
        own, others = (((z - center) / temperature).softmax(-1) for z in (logits, theirs))
        count = valid.sum(1, keepdim=True)
        others = (others * valid[..., None]).sum(1) / count.clamp_min(1)
        share = (self.share * (count > 0)).repeat(2, 1)
        target = (1 - share) * own + share * others.repeat(2, 1)
        return center + temperature * target.clamp_min(torch.finfo(target.dtype).tiny).log()

    def add(self, feature: Tensor, projection: Tensor, ids: Tensor):
        """Put images into the bank, in place of the oldest ones: their features (batch, width), their projections (batch,
        bottleneck) and their hashes (batch). Raise ValueError if the bank is smaller than the batch.
        """
        size = len(self.features)
        if len(feature) > size:
            raise ValueError(f"the bank holds {size} images and a batch has {len(feature)}; expected a larger bank")
        index = (self.count + torch.arange(len(feature), device=feature.device)) % size
        self.features[index] = feature.to(self.features)
        self.projections[index] = projection.to(self.projections)
        self.ids[index] = ids
        self.count += len(feature)


def image_hashes(images: Tensor) -> Tensor:
    """Return one integer for each image, computed from its pixels, shape (batch,). Equal images get equal integers. By these
    numbers DINO recognizes an image in its memory bank of recent images, so that no image is its own neighbor.
    """
    flat = images.flatten(1)
    flat = (flat.cpu() if flat.device.type == "mps" else flat).double()  # Apple's GPUs have no float64
    products = flat * torch.linspace(1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device).sin()
    # added up as integers, because the rounding of a sum of floats may depend on the number of images
    return products.view(torch.int64).sum(1).to(images.device)  # a model in half precision keeps integers as they are


class PatchTerm(nn.Module):
    """The patch term of iBOT: the student predicts the teacher's output for patches that are hidden from it.

    `make_head` makes a projection head for tokens of the width `width`, with `prototypes` outputs. `ratio` is the share of
    hidden patches in a view, and `temperature` that of the teacher after the warm-up.
    """

    center: Tensor  # moving mean of the teacher's outputs for all patches

    def __init__(self, make_head: Callable[[], Any], width: int, prototypes: int, ratio: float, temperature: float):
        super().__init__()
        self.head, self.teacher_head = student_and_teacher(make_head)
        self.hidden_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=0.02))
        self.register_buffer("center", torch.zeros(prototypes))
        self.ratio, self.temperature = ratio, temperature

    def draw_hidden(self, views: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return which patches of the student's global views are hidden, a boolean tensor of shape (views, patches). About half
        of the views have hidden patches, and in each of them the share `ratio` of its patches is hidden, rounded, at least one
        patch. `grid` is the number of rows and columns of patches.

        Patches are drawn on the CPU, so that a seed gives the same patches on every device.
        """
        n = prod(grid)
        count = max(round(self.ratio * n), 1)
        order = torch.rand(len(views), n, device="cpu").argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        masked = torch.rand(len(views), 1, device="cpu") < MASKED_VIEWS
        return upload((order < count) & masked, views.device)

    def read(self, model: Any, views: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the features of views, shape (views, width), and the tokens of their patches, shape (views, patches, width).
        `hidden` (views, patches) is True for patches that the model must not see; None hides none.
        """
        with self.hidden_tokens(model, hidden):
            if hidden is not None:
                grid, image = model.tokenizer.grid(views.shape[-2:]), (views.shape[2], views.shape[3])
                views = views.masked_fill(pixels_of_patches(hidden, grid, image), 0.0)
            tokens, size = model.tokens(views)
        return model.pooled(tokens, size), tokens[:, len(model.prefix) :]

    @contextmanager
    def hidden_tokens(self, model: Any, hidden: Tensor | None) -> Iterator[None]:
        """Context manager inside which the tokenizer of `model` gives a learned token for each patch where `hidden` (views,
        patches) is True. None changes nothing.
        """
        if hidden is None:
            yield
            return

        def replace(module: nn.Module, inputs: tuple, tokens: Tensor) -> Tensor:
            """Return the tokens of the tokenizer, with the learned token in the place of hidden ones."""
            return torch.where(hidden[..., None], self.hidden_token.to(tokens.dtype), tokens)

        with model.tokenizer.register_forward_hook(replace):
            yield

    def loss(
        self, theirs: Tensor, patches: Tensor, hidden: Any, teacher_temp: float, student_temp: float, momentum: float
    ) -> Tensor:
        """Return the cross-entropy between the teacher's and the student's outputs for hidden patches, averaged over the hidden
        patches of each view and over all views. `theirs` and `patches` are the tokens of teacher and student, shape (views,
        patches, width). `hidden` (views, patches) is True for hidden patches.

        Then the center of the teacher's patches is updated, a moving mean with this `momentum`.
        """
        with torch.no_grad():
            targets = at_least_float32(self.teacher_head(theirs.flatten(0, 1)))
            probabilities = ((targets - self.center) / teacher_temp).softmax(-1)
        logits = at_least_float32(self.head(patches.flatten(0, 1)))
        each = -(probabilities * (logits / student_temp).log_softmax(-1)).sum(-1).view_as(hidden)
        with torch.no_grad():
            self.center.lerp_(targets.mean(0).to(self.center), 1 - momentum)
        return ((each * hidden).sum(1) / hidden.sum(1).clamp_min(1)).mean()
