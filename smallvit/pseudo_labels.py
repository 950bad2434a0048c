"""Pseudo-labels: what images without labels are taken for, by what a model says of them and a few labels.

Contract: `pseudo_labels(model, known, images)` gives a label for each of `images`, n int64, by the labelled images `known`; the
labels of `images` are 0 and mean nothing. The model is the start of the run, as it was trained before. It is deterministic.
"""

import warnings

import torch
from torch import Tensor, nn

from smallvit.data import Images
from smallvit.evaluate import features


def label_spreading(
    model: nn.Module,
    known: Images,
    images: Images,
    *,
    neighbours: int = 10,
    alpha: float = 0.99,
    steps: int = 100,
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> Tensor:
    """Labels that flow from image to image, over `steps` steps, between those that are near in the features of a model.

    Paper    Zhou et al. 2003 (NIPS), Learning with Local and Global Consistency: F <- alpha S F + (1 - alpha) Y, S the graph of
             neighbours, normalised on both sides; by scikit-learn's `LabelSpreading`. That of features learned without labels:
             Iscen et al. 2019, arXiv:1904.04717.
    Departs  Two images are neighbours if either is among the `neighbours` nearest of the other by cosine; in scikit-learn's own
             graph each has its own alone, which on digits costs more than a point. Iscen et al. weigh neighbours by their
             likeness and images by their certainty, and spread labels again after every epoch: here once, all alike.

    `of`, `layers` and `norm` name the features as in `features`. Time and memory grow with images times neighbours, the search
    for these with the square of the images: half a minute for 60,000 on one core.

    An image that no label reaches in so many steps has that of the labelled image that is nearest to it.

    Raises   ValueError for fewer images than neighbours, or numbers out of range.
    """
    from scipy.sparse import csr_matrix
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neighbors import kneighbors_graph
    from sklearn.semi_supervised import LabelSpreading

    if not 0 < alpha < 1 or steps < 1:
        raise ValueError(f"alpha is {alpha} and steps {steps}; expected a share between 0 and 1, and at least 1 step")
    if not 1 <= neighbours < len(known) + len(images):
        raise ValueError(f"neighbours is {neighbours}; expected from 1 to fewer than the {len(known) + len(images)} images")
    found = [torch.from_numpy(features(model, part, of=of, layers=layers, norm=norm)) for part in (known, images)]
    x = nn.functional.normalize(torch.cat(found), dim=1).numpy()
    labels = torch.cat([known.labels, torch.full_like(images.labels, -1)]).numpy()  # -1: not known
    near = csr_matrix(kneighbors_graph(x, neighbours))
    graph = near.maximum(near.T)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # as many steps as asked for
        spread = LabelSpreading(kernel=lambda one, other: graph, alpha=alpha, max_iter=steps, tol=0.0).fit(x, labels)
    found = torch.from_numpy(spread.transduction_).long()
    lost = torch.from_numpy(spread.label_distributions_.sum(1) == 0).nonzero()[:, 0]
    found[lost] = known.labels[(torch.from_numpy(x[lost.numpy()]) @ torch.from_numpy(x[: len(known)]).T).argmax(1)]
    return found[len(known) :]
