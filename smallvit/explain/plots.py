"""Plots of what a model has learned: where its positions are alike, how its features lie, what it takes for what.

Each is a matplotlib `Figure`. `feature_view` and `confusion_figure` take arrays, tensors or lists, and need no model.
"""

from collections.abc import Sequence

MOST = 20  # classes with a colour of their own


def position_similarity(model: "torch.nn.Module", *, image: tuple[int, int] | None = None) -> "matplotlib.figure.Figure":  # noqa: F821
    """How alike the positions of a model are: for each patch a small map of the cosines between its position and all others.

    The maps stand where their patches stand. Positions are what the model adds to its tokens, learned or fixed: of a `ViT`, for
    images of height and width `image` (by default those that it was built for), or of a timm model.

    Paper    The figure is that of ViT, arXiv:2010.11929, figure 7.
    Raises   ValueError for a model that adds no positions to its tokens.
    """
    import numpy as np
    from matplotlib.figure import Figure

    table, (rows, columns) = positions(model, image)
    unit = table / np.maximum(np.linalg.norm(table, axis=-1, keepdims=True), 1e-12)
    cosines = (unit @ unit.T).reshape(rows, columns, rows, columns)
    gap = max(1, round(max(rows, columns) / 7))  # in cells, between two maps
    page = np.full((rows * (rows + gap) - gap, columns * (columns + gap) - gap), np.nan)
    for row, column in np.ndindex(rows, columns):
        top, left = row * (rows + gap), column * (columns + gap)
        page[top : top + rows, left : left + columns] = cosines[row, column]

    side = max(5.5, 0.45 * max(rows, columns)) / max(page.shape)
    figure = Figure(figsize=(side * page.shape[1] + 1.5, side * page.shape[0] + 0.6), layout="constrained")
    ax = figure.add_subplot()
    shown = ax.imshow(page, cmap="viridis", vmin=min(cosines.min(), 0.99), vmax=1, interpolation="none")
    ax.set_xticks((columns - 1) / 2 + (columns + gap) * np.arange(columns), range(columns), fontsize=8)
    ax.set_yticks((rows - 1) / 2 + (rows + gap) * np.arange(rows), range(rows), fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="column of the patch", ylabel="row of the patch")
    figure.colorbar(shown, ax=ax, shrink=0.7, label="cosine between positions").outline.set_visible(False)
    return figure


def positions(model, image: tuple[int, int] | None):
    """What is added to each patch, p d, in double precision, and the grid of patches."""
    import torch

    from smallvit.vit import ViT

    kind = type(model).__name__
    if isinstance(model, ViT):
        grid = model.tokenizer.grid(image or model.image)
        if model.position is None:
            raise ValueError(f"this {kind} has no positions (position=None); expected a model that adds some to its tokens")
        blank = model.prefix.new_zeros(1, len(model.prefix) + grid[0] * grid[1], model.prefix.shape[1])
        with torch.inference_mode():
            table = model.position(blank, grid)[0, len(model.prefix) :]
    else:
        table, grid = getattr(model, "pos_embed", None), getattr(getattr(model, "patch_embed", None), "grid_size", None)
        if not isinstance(table, torch.Tensor) or table.ndim != 3 or grid is None:
            raise ValueError(f"this {kind} has no table of positions; expected a ViT or a Vision Transformer of timm with one")
        if image is not None:
            raise ValueError(f"image is {image} for a {kind} of timm; expected None, its own size, or from_timm(model)")
        table = table[0, table.shape[1] - grid[0] * grid[1] :]
    table = table.detach().double().cpu().numpy()
    if not table.any():
        raise ValueError(f"the positions of this {kind} are all zero, which point nowhere; expected some that are not")
    return table, grid


def position_table(length: int, width: int) -> "matplotlib.figure.Figure":  # noqa: F821
    """The sines and cosines that tell a token its place, as a picture: a row for each place, a column for each channel.

    Paper    Vaswani et al. 2017, arXiv:1706.03762, section 3.5, as in `SinCos1d`: channel 2k is the sine of
             place / 10000^(2k/d), channel 2k + 1 its cosine. The first channels turn fast, the last hardly at all.
    Raises   ValueError for less than one place, or a width that is odd or less than 2.
    """
    from matplotlib.figure import Figure

    from smallvit.positions import SinCos1d

    if length < 1 or width < 2 or width % 2:
        raise ValueError(f"got length {length} and width {width}; expected at least one place, and an even width")
    table = SinCos1d(width, (1, length), 0).table.numpy()

    figure = Figure(figsize=(6, 5), layout="constrained")
    ax = figure.add_subplot()
    shown = ax.imshow(table, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    ax.set(xlabel="channel", ylabel="place", title=f"{length:,} places, {width:,} channels")
    ax.spines[:].set_visible(False)
    figure.colorbar(shown, ax=ax, ticks=[-1, 0, 1]).outline.set_visible(False)
    return figure


def feature_view(
    features: "numpy.ndarray",  # noqa: F821
    labels: Sequence[int],
    *,
    classes: Sequence[str] | None = None,
    method: str = "pca",
) -> "matplotlib.figure.Figure":  # noqa: F821
    """Features in two dimensions, a dot for each image, a colour for each class: n d and n labels -> a picture.

    `method="pca"` looks from where as much of their variance as possible is seen, and says how much of it that is.
    `method="tsne"` puts neighbours beside each other (scikit-learn's t-SNE, started from the principal components): neither
    distances between clusters nor their sizes mean anything. The same features give the same picture. Labels are coloured and
    never learned from.

    feature_view(features(model, images), images.labels, classes=images.spec.classes)

    Raises   ValueError for another method, other than one label for each feature, fewer than 3 images, fewer than 2 channels,
             and for a class that has no name.
    """
    import numpy as np
    from matplotlib.figure import Figure

    x, labels = np.asarray(features, dtype=np.float64), np.asarray(labels)
    if x.ndim != 2 or len(x) < 3 or x.shape[1] < 2 or labels.shape != x.shape[:1]:
        raise ValueError(f"got features {x.shape} and labels {labels.shape}; expected n d and n, n at least 3 and d at least 2")
    if classes is not None:
        refuse_nameless("labels", labels, classes)
    plane, names = flattened(x, method)

    found = np.unique(labels)
    legend = -(-len(found) // 20)  # columns of names
    figure = Figure(figsize=(5.8 + 0.8 * legend, 5), layout="constrained")
    ax = figure.add_subplot()
    for label, colour in zip(found, colours(len(found))):
        at = plane[labels == label]
        name = str(label if classes is None else classes[label])
        ax.scatter(*at.T, s=float(np.clip(6_000 / len(x), 5, 30)), color=colour, alpha=0.8, linewidths=0, label=name)
    ax.set(xlabel=names[0], ylabel=names[1], title=f"{len(x):,} images, {x.shape[1]} channels")
    ax.set_aspect("equal", adjustable="datalim")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, markerscale=2, ncols=legend)
    return figure


def flattened(x, method: str):
    """n d -> n 2, and what the two axes are."""
    import numpy as np

    if method not in ("pca", "tsne"):
        raise ValueError(f"method is {method!r}; expected 'pca' or 'tsne'")
    from sklearn.decomposition import PCA

    with np.errstate(invalid="ignore"):  # features that do not vary have no shares
        pca = PCA(n_components=2, svd_solver="full").fit(x)
    if method == "pca":
        shares = 100 * np.nan_to_num(pca.explained_variance_ratio_)
        return pca.transform(x), [f"component {i}: {share:.0f}% of the variance" for i, share in enumerate(shares, start=1)]
    from sklearn.manifold import TSNE

    start = pca.transform(x)
    start = start / max(start[:, 0].std(), 1e-12) * 1e-4
    tsne = TSNE(init=start, perplexity=min(30, (len(x) - 1) / 3), random_state=0, n_jobs=1)
    return tsne.fit_transform(x), ["t-SNE: neighbours are near, distances between clusters mean nothing", ""]


def colours(n: int) -> list:
    """So many colours: ten and twenty that are told apart, beyond that a rainbow in which neighbours are alike."""
    import matplotlib

    if n <= MOST:
        return list(matplotlib.colormaps["tab10" if n <= 10 else "tab20"].colors[:n])
    return [matplotlib.colormaps["turbo"](place / (n - 1)) for place in range(n)]


def refuse_nameless(what: str, numbers: "numpy.ndarray", classes: Sequence[str]):  # noqa: F821
    """Raise ValueError for a class that has no name."""
    if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= len(classes):
        got = f"{numbers.min()} and {numbers.max()}"
        raise ValueError(f"got {what} like {got}; expected numbers of classes, 0 to {len(classes) - 1}")


def confusion_figure(guesses: Sequence[int], labels: Sequence[int], classes: Sequence[str]) -> "matplotlib.figure.Figure":  # noqa: F821
    """What was taken for what: rows are true classes, columns guesses, numbers count images.

    A cell is as dark as its share of its row: right guesses in blue on the diagonal, errors in orange, whose colours reach
    their full strength at the most frequent error.

    Raises   ValueError for no images, another number of labels than guesses, and for a class that has no name.
    """
    import numpy as np
    from matplotlib.figure import Figure

    guesses, labels, k = np.asarray(guesses), np.asarray(labels), len(classes)
    if guesses.ndim != 1 or guesses.shape != labels.shape or not len(labels):
        raise ValueError(f"got guesses {guesses.shape} and labels {labels.shape}; expected as many of each, at least one")
    refuse_nameless("guesses", guesses, classes)
    refuse_nameless("labels", labels, classes)
    counts = np.zeros((k, k), dtype=int)
    np.add.at(counts, (labels, guesses), 1)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    right = np.eye(k, dtype=bool)
    errors = np.where(right, np.nan, share)

    side = 1.6 + 0.42 * k
    figure = Figure(figsize=(side, side), layout="constrained")
    ax = figure.add_subplot()
    ax.imshow(np.where(right, share, np.nan), cmap="Blues", vmin=0, vmax=1.4)
    ax.imshow(np.ma.masked_invalid(errors), cmap="Oranges", vmin=0, vmax=max(np.nanmax(errors, initial=0), 1e-12) * 1.4)
    for row, column in np.argwhere(counts):
        ax.text(column, row, counts[row, column], ha="center", va="center", fontsize=8)
    turned = 90 if max(map(len, map(str, classes))) > 3 else 0
    ax.set_xticks(range(k), classes, rotation=turned)
    ax.set_yticks(range(k), classes)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    wrong = int((guesses != labels).sum())
    ax.set(xlabel="guessed", ylabel="true", title=f"{wrong:,} of {len(labels):,} wrong ({wrong / len(labels):.1%})")
    return figure
