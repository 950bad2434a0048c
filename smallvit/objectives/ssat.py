"""SSAT: supervised training with the reconstruction of hidden patches as a second task."""

from typing import Any

from torch import Tensor

from smallvit.augment import Batch
from smallvit.vit import ViT

from .mae import MAE, check_targets
from .objective import check_option_range
from .supervised import Supervised


class SSAT(Supervised):
    """The objective SSAT, a supervised objective with a self-supervised second task. In each step, one encoder learns to
    classify the whole images, as in `Supervised`, and to reconstruct hidden patches of the same images, as in `MAE`.

    The encoder processes each image twice: all patches to classify it, and the visible patches to reconstruct the others. The
    labels train the head, the reconstruction trains the decoder, and both train the encoder.

    weight        the weight of the cross-entropy; the reconstruction has the weight 1 - weight.
    ratio         the share of patches to hide. `normalize` and the options of the decoder are those of `MAE`.
    class_weight  see `Supervised`.

    Paper    Das et al. 2023 (SSAT), arXiv:2310.20704: `weight` 0.1, three quarters of the patches hidden, pixels without
             normalization, a decoder of 2 blocks of width 128.
    Off      `weight=1` equals `Supervised`, bit for bit; no patches are drawn then. `weight=0` has the loss of `MAE`.
    Departs  `weight` is 0.5; tune it. The best weight depends on the scale of the pixels and of the cross-entropy, and the
             authors' value is for photos of 224 x 224 pixels. The decoder is that of `MAE`, of width 64.

    The target pixels are those after augmentation. `RandomErasing` raises an error, because the decoder would have to predict
    its black rectangles. After mixup or CutMix, which the authors do not use, the target is the mixed image.

    Raises   ValueError in all cases in which `Supervised` and `MAE` do, such as for a model that reduces tokens, and for a
             weight outside 0 to 1.
    """

    def __init__(
        self,
        model: ViT,
        *,
        weight: float = 0.5,
        ratio: float = 0.75,
        normalize: bool = False,
        decoder_dim: int = 64,
        decoder_depth: int = 2,
        decoder_heads: int = 4,
        class_weight: str | None = None,
    ):
        super().__init__(model, class_weight=class_weight)
        check_option_range(weight=(weight, 0, 1))
        self.weight = weight
        decoder = {"decoder_dim": decoder_dim, "decoder_depth": decoder_depth, "decoder_heads": decoder_heads}
        self.parts = [MAE(model, ratio=ratio, normalize=normalize, **decoder)]  # a list hides the second use of the model
        self.decoder = self.mae.decoder

    @property
    def mae(self) -> MAE:
        """The masked autoencoder that is trained as the second task. It has the same model and decoder as this objective."""
        return self.parts[0]

    def prepare(self, batch: Batch) -> Batch:
        """Return a copy of the batch that also holds the numbers of the visible and of the hidden patches of each image. The
        training loop calls this method before each step, for each run of a stack separately.
        """
        batch = super().prepare(batch)
        return batch if self.weight == 1 else batch._replace(draws=self.mae.hide(batch.images))

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under the key "loss". If `weight` is neither 0 nor 1, it also has the two
        terms without their weights, under the keys "cross_entropy" and "reconstruction". `progress` is the finished fraction of
        the training run, from 0 to 1.
        """
        if self.weight == 1:
            return super().forward(batch, progress)
        mae, images = self.mae, batch.images
        visible, hidden = batch.draws or mae.hide(images)
        predicted = mae.decoder(mae.encode(images, visible), visible, hidden, mae.grid(images))
        reconstruction = mae.error(predicted, images, hidden)
        if self.weight == 0:
            return {"loss": reconstruction}
        cross_entropy = super().forward(batch, progress)["loss"]
        loss = self.weight * cross_entropy + (1 - self.weight) * reconstruction
        return {"loss": loss, "cross_entropy": cross_entropy.detach(), "reconstruction": reconstruction.detach()}

    @classmethod
    def check_run(cls, run: Any):
        """Raise ValueError if the settings of a training run cannot be combined with this objective: in addition to those that
        `Supervised` refuses, random erasing, because erased rectangles would have to be predicted. `run` is a `Run`.
        """
        super().check_run(run)
        check_targets(cls.__name__, run)
