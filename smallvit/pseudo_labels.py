"""Pseudo-labels: labels for unlabelled images, derived from a few labelled images and the features of a trained model.

A function of this kind is called as `pseudo_labels(model, labelled, unlabelled)`. It returns one int64 label for each image of
`unlabelled`; the labels stored in `unlabelled` are all 0 and must not be used. The model is the initialization of the run,
after its pretraining, or, in a run without one, its teacher. The function must be deterministic.
"""

import warnings

import torch
from torch import Tensor, nn

from smallvit.data import Images
from smallvit.evaluate import features


def label_spreading(
    model: nn.Module,
    labelled: Images,
    unlabelled: Images,
    *,
    neighbors: int = 10,
    alpha: float = 0.99,
    steps: int = 100,
    balanced: bool = False,
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> Tensor:
    """Return an estimated label for each of the `unlabelled` images, as int64 (label spreading). The known labels of the
    `labelled` images spread to images with similar features. The `model` computes the features.

    neighbors    two images are connected if one is among this many nearest neighbors of the other, by cosine similarity
    alpha        weight of the neighbors' labels, relative to the known label, between 0 and 1
    steps        number of iterations
    balanced     True: at the end, the scores of each class are multiplied by one factor, so that the sum of the scores of each
                 class is in proportion to its number of labelled images. This assumes that the classes are as frequent
                 among the unlabelled images as among the labelled ones
    of, layers, norm   which features of the model to use, as in `features`

    An image that no label reaches in `steps` iterations gets the label of the most similar labelled image. Time and memory grow
    with images x neighbors, and the neighbor search with the square of the images: half a minute for 60,000 on one core.

    Paper    Zhou et al. 2003 (NIPS), Learning with Local and Global Consistency: F <- alpha S F + (1 - alpha) Y, where S is the
             symmetrically normalized graph; computed by scikit-learn's `LabelSpreading`. On features learned without labels:
             Iscen et al. 2019, arXiv:1904.04717. `balanced` is the class mass normalization of Zhu et al. 2003 (ICML),
             Semi-supervised learning using Gaussian fields and harmonic functions, with scores that sum to 1 for each image.
    Departs  scikit-learn's own graph connects each image to its own neighbors only, which is not symmetric and costs more than
             a point on digits. Iscen et al. weight neighbors by similarity and images by certainty, and spread the labels again
             after every epoch; here all weights are equal and labels are spread once.
    Raises   ValueError if there are not more images than neighbors, or an option is out of range.
    """
    import numpy as np
    from scipy.sparse import csr_matrix
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neighbors import kneighbors_graph
    from sklearn.semi_supervised import LabelSpreading

    total = len(labelled) + len(unlabelled)
    if not 0 < alpha < 1 or steps < 1:
        raise ValueError(f"alpha is {alpha} and steps is {steps}; expected 0 < alpha < 1 and at least 1 step")
    if not isinstance(balanced, bool):
        raise ValueError(f"balanced is {balanced!r}; expected True to balance the classes, or False")
    if not 1 <= neighbors < total:
        raise ValueError(f"neighbors is {neighbors}; expected at least 1, and fewer than the {total} images")
    parts = [torch.from_numpy(features(model, images, of=of, layers=layers, norm=norm)) for images in (labelled, unlabelled)]
    x = nn.functional.normalize(torch.cat(parts), dim=1).numpy()
    labels = torch.cat([labelled.labels, torch.full_like(unlabelled.labels, -1)]).numpy()  # -1 means unlabelled
    nearest = csr_matrix(kneighbors_graph(x, neighbors))
    graph = nearest.maximum(nearest.T)
    # a kernel may be a function of the features; this one returns the graph
    spreading = LabelSpreading(alpha=alpha, max_iter=steps, tol=0.0).set_params(kernel=lambda *_: graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of steps is fixed
        spreading.fit(x, labels)
    scores, classes = spreading.label_distributions_, spreading.classes_
    factors = np.bincount(labelled.labels.numpy())[classes] / scores.sum(0) if balanced else 1.0
    result = torch.from_numpy(classes[(scores * factors).argmax(1)]).long()
    missed = torch.from_numpy(scores.sum(1) == 0).nonzero()[:, 0]
    result[missed] = labelled.labels[(torch.from_numpy(x[missed.numpy()]) @ torch.from_numpy(x[: len(labelled)]).T).argmax(1)]
    return result[len(labelled) :]


label_spreading.added_options = {"balanced": False}
