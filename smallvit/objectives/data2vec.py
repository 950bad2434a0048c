"""data2vec 2: prediction of a teacher's features of hidden patches."""

import torch
import torch.nn.functional as F
from torch import Tensor

from smallvit.attention import at_least_float32
from smallvit.augment import Batch
from smallvit.random_weights import initialize
from smallvit.reduction.context import gather_tokens
from smallvit.slot_checks import check_integers
from smallvit.vit import ViT

from .collapse import Observation
from .mae import MAE, Decoder
from .objective import check_option_range, outputs_of
from .teacher import TeacherObjective

LAST_MOMENTUM = 0.9999  # of the teacher, at the end of a run


class Data2Vec(TeacherObjective):
    """The objective data2vec 2, self-supervised learning without augmented views. The student sees a part of the patches of an
    image. From its output, a small decoder predicts the features that a teacher computes for the hidden patches. The teacher
    sees the whole image. It is an exponential moving average (EMA) of the student.

    The teacher is `.model`, which is saved and evaluated. The head and the parameters of the pool are not trained.

    ratio     the share of patches to hide; the number of visible patches is rounded down.
    masks     the number of random masks for each image; all of them share one forward pass of the teacher.
    layers    the number of last blocks whose outputs are the targets; None: all.
    momentum  the EMA momentum of the teacher at the start; it rises linearly to 0.9999.
    decoder   width (`decoder_dim`), number of blocks (`decoder_depth`) and of heads (`decoder_heads`), as in `MAE`.

    Paper    Baevski et al. 2022, arXiv:2212.07525. The targets are the outputs of the MLPs in the last blocks of the teacher,
             before they are added to the tokens, normalized, averaged over the blocks, and normalized for each token (mean 0,
             variance 1). Loss: the squared error, summed over the width d of a token and divided by the square root of d,
             averaged over the hidden patches. The encoder of the student receives the visible patches only.
    Departs  The authors normalize each channel over the tokens of an image, which is noisy for 16 tokens. Here each token is
             normalized. After averaging over the blocks, the mean over the batch is subtracted at each position; otherwise the
             target of a small model would mostly encode the position of the patch. 60% of the patches are hidden, drawn
             uniformly; the authors hide 80%, in blocks. The decoder is that of `MAE`, not a convolutional one. 4 masks instead
             of 16. The class token gets no target (the paper has a term for it), so use a pool of patch tokens, such as
             `MeanTokens`. Hidden pixels are set to 0 before the tokenizer, as in `MAE`.

    Raises   ValueError in all cases in which `MAE` does, such as for a model that reduces tokens, and for options out of range.
    """

    def __init__(
        self,
        model: ViT,
        *,
        ratio: float = 0.6,
        masks: int = 4,
        layers: int | None = None,
        momentum: float = 0.99,
        decoder_dim: int = 64,
        decoder_depth: int = 2,
        decoder_heads: int = 4,
    ):
        super().__init__(model)
        decoder = {"decoder_dim": decoder_dim, "decoder_depth": decoder_depth, "decoder_heads": decoder_heads}
        mae = MAE(model, ratio=ratio, normalize=False, **decoder)
        depth = len(model.blocks)
        check_integers(masks=(masks, 1))
        check_option_range(momentum=(momentum, 0, LAST_MOMENTUM))
        if depth < 1 or not 1 <= (depth if layers is None else layers) <= depth:
            raise ValueError(f"layers is {layers} for a model of {depth} blocks; expected from 1 to {depth}, or None for all")
        self.masks, self.momentum, self.layers = masks, momentum, layers or depth
        prefix, grid = model.prefix.shape, model.tokenizer.grid(model.image)
        self.decoder = mae.decoder = Decoder(prefix, grid, prefix[1], decoder_dim, decoder_depth, decoder_heads)
        initialize(self.decoder)
        self.parts = [mae]  # a list hides the second use of the student

    def prepare(self, batch: Batch) -> Batch:
        """Return a copy of the batch that also holds the numbers of the visible and of the hidden patches of each image, for
        each mask. The training loop calls this method before each step.
        """
        batch = super().prepare(batch)
        return batch._replace(draws=self.parts[0].hide(self.repeated(batch.images))) if self.draws_for(Data2Vec) else batch

    def repeated(self, images: Tensor) -> Tensor:
        """Return all images once for each mask, shape (masks * batch, channels, height, width)."""
        return images.repeat(self.masks, 1, 1, 1)

    def forward(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Return a dict with the loss of a batch under the key "loss". Which patches are hidden is drawn if the batch does not
        say it. `progress` is not used.
        """
        images = self.repeated(batch.images)
        visible, hidden = batch.draws or self.parts[0].hide(images)
        targets = self.targets(batch.images).repeat(self.masks, 1, 1)
        tokens = self.parts[0].encode(images, visible)
        predicted = at_least_float32(self.decoder(tokens, visible, hidden, self.parts[0].grid(images)))
        squares = (predicted - gather_tokens(targets, hidden)).square()
        return {"loss": squares.sum(-1).mean() / squares.shape[-1] ** 0.5}

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        """Return the targets of all patches, shape (batch, patches, width): the MLP outputs of the teacher's last blocks,
        normalized and averaged. Each row has mean 0 and variance 1.

        The features of the teacher are stored in the attribute `observed`, which is checked for collapse.
        """
        with outputs_of(block.mlp for block in list(self.model.blocks)[-self.layers :]) as outputs:
            self.observed = Observation(self.model.features(images))
        width, prefix = outputs[0].shape[-1:], len(self.model.prefix)
        if len(images) < 2:
            raise ValueError("Data2Vec subtracts the mean over the batch and got one image; expected a batch of at least two")
        mean = torch.stack([F.layer_norm(at_least_float32(output[:, prefix:]), width) for output in outputs]).mean(0)
        return F.layer_norm(mean - mean.mean(0), width)

    def student_weight(self, progress: float) -> float:
        """Return 1 - the momentum of the teacher, which rises linearly. `progress` is the finished fraction of the run, from 0
        to 1.
        """
        return (1 - self.momentum) * (1 - progress) + (1 - LAST_MOMENTUM) * progress
