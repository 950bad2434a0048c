"""LeJEPA: learning without labels and without a teacher, from views that agree and outputs with a Gaussian distribution."""

import torch
from torch import Tensor, nn

from smallvit.attention import at_least_float32
from smallvit.augment import Batch
from smallvit.augment.batch import upload
from smallvit.slot_checks import check_integers

from .collapse import Observation
from .dino import feature_width
from .objective import Objective, check_option_range, check_views

KNOTS, T_MAX = 17, 3.0  # frequencies at which the characteristic function is compared, and the largest one


class LeJEPA(Objective):
    """The objective LeJEPA, self-supervised learning without a teacher. The loss pulls the outputs of the views of an image
    together, and makes the outputs of all images follow a standard Gaussian distribution in every direction (SIGReg), so they
    cannot collapse.

    The outputs are those of a small network (projector) after the model's features. Only the model is saved. `batch.views`
    come from `augment.digit_crops()` or `augment.photo_crops()`. The model must have `features`, b d, and a linear `head`,
    which is not trained.

    weight  the weight of SIGReg; the distance between the views has the weight 1 - weight. Deviations from a Gaussian are
            multiplied by the batch size, so change `weight` in inverse proportion to the batch size. With 0, no directions are
            drawn, and the outputs collapse.
    slices  the number of random directions in which the distributions are compared; they are drawn again in each step.
    hidden  the width of the two hidden layers of the projector, and `dim` the width of its output. `dim` should be much less
            than the batch size.

    Paper    Balestriero, LeCun 2025 (LeJEPA), arXiv:2511.08544. Each output is projected onto `slices` directions of length 1.
             For each view and each direction, SIGReg is the Epps-Pulley statistic of the n images: n times the integral, with a
             Gaussian window, of the squared difference between their characteristic function and that of N(0, 1). It is
             averaged over views and directions. The other term is the squared distance of each view to the mean of the global
             views of its image, averaged over views, images and dimensions. Both terms and the projector (linear maps with
             BatchNorm and ReLU) are those of lightly, which follow the authors' code: 17 frequencies from 0 to 3, the
             trapezoidal rule, and twice the half integral.
    Departs  Smaller: 64 directions and a projector of width 256; the authors use 1,024 and 2,048. 1,024 directions take longer
             than a small ViT. `weight` is 0.1 for batches of 128 images; the authors use 0.05 for 256. Directions depend on
             the seed of the run and on the step; the authors' depend on the step alone. The projector always has BatchNorm: an
             untrained narrow ViT gives all digits nearly the same features, and SIGReg has no gradient if all outputs are
             equal.

    The outputs of the global views are checked for collapse. SIGReg is 1.05 for Gaussian outputs, for any batch size n, and
    0.402 n if all outputs are 0. Outputs in clusters, such as one point for each class, have a larger loss. So the features
    suit a linear probe and fine-tuning better than nearest neighbors.

    Raises   ValueError for a batch without views, for a model without features or a linear head, and for options out of range.
    """

    needs_labels = False
    needs_views = True
    stackable = True

    def __init__(self, model: nn.Module, *, weight: float = 0.1, slices: int = 64, hidden: int = 256, dim: int = 32):
        super().__init__(model)
        from lightly.models.modules.heads import LeJEPAProjectionHead

        check_option_range(weight=(weight, 0, 1))
        check_integers(slices=(slices, 1), hidden=(hidden, 1), dim=(dim, 1))
        self.weight, self.slices, self.dim = weight, slices, dim
        self.projector = LeJEPAProjectionHead(feature_width(model), hidden, dim)

    def prepare(self, batch: Batch) -> Batch:
        """Return a copy of the batch that also holds the directions for SIGReg. The training loop calls this method before each
        step, for each run of a stack separately.
        """
        batch = super().prepare(batch)
        if not self.weight or not self.draws_for(LeJEPA):
            return batch
        return batch._replace(draws=(upload(self.draw_directions(), batch.images.device),))

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under the key "loss", and its two terms without their weights under the keys
        "invariance" and "sigreg" (absent if its weight is 0). The directions are drawn if the batch does not hold them.
        `progress` is the finished fraction of the training run, from 0 to 1. Raise ValueError if the batch does not have two
        global views of each image.
        """
        check_views("LeJEPA", batch)
        (directions,) = (batch.draws or (self.draw_directions(),)) if self.weight else (None,)
        b, features = len(batch.images), [self.model.features(views) for views in batch.views]
        joined = torch.cat(features).to(next(self.projector.parameters()).dtype)
        with torch.autocast(joined.device.type, enabled=False):  # a stack cannot compute BatchNorm in half precision
            outputs = at_least_float32(self.projector(joined)).unflatten(0, (-1, b))
        self.observed = Observation(outputs[:2].detach().flatten(0, 1))
        center = outputs[:2].mean(0)  # of the global views
        terms = {"invariance": (outputs - center).square().mean()}
        loss = (1 - self.weight) * terms["invariance"]
        if directions is not None:
            terms["sigreg"] = sigreg(outputs, directions.to(outputs))
            loss = loss + self.weight * terms["sigreg"]
        return {"loss": loss} | {name: term.detach() for name, term in terms.items()}

    def draw_directions(self) -> Tensor:
        """Return random directions of length 1, shape (dim, slices). They are drawn on the CPU, so that a seed gives the same
        directions on every device.
        """
        return nn.functional.normalize(torch.randn(self.dim, self.slices, device="cpu"), dim=0)


def sigreg(outputs: Tensor, directions: Tensor) -> Tensor:
    """Return the distance between the distribution of `outputs` (..., images, dim) and a standard Gaussian, a scalar tensor.
    The two are compared along each of the `directions`, unit vectors of shape (dim, slices). The leading axes, such as views,
    are separate distributions; the result is the mean over them and over the directions.

    In each direction, this is the Epps-Pulley statistic: the number of images times the integral over t from -3 to 3 of
    |c(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2), where c is the characteristic function of the images, by the trapezoidal rule.
    """
    with torch.autocast(outputs.device.type, enabled=False):  # half precision would round the phases
        t = torch.linspace(0, T_MAX, KNOTS, dtype=outputs.dtype, device=outputs.device)
        gaussian = (-t.square() / 2).exp()
        weights = 2 * T_MAX / (KNOTS - 1) * gaussian  # twice the half integral, because it is symmetric
        weights[:: KNOTS - 1] /= 2  # the first and the last
        phases = (outputs @ directions)[..., None] * t
        squares = (phases.cos().mean(-3) - gaussian).square() + phases.sin().mean(-3).square()
        return outputs.shape[-2] * (squares @ weights).mean()
