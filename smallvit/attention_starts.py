"""Other initializations of the weights of attention: mimetic and impulse initialization.

Both functions create an attention module of a given class and change only the initialization of its weights: see
`smallvit.attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import Attention
from smallvit.attention_variants import DifferentialAttention

Strength = tuple[float, float]  # of the noise, and of the identity matrix


def mimetic_start(
    dim: int, heads: int, *, attention: Callable = Attention,
    query_key: Strength | None = (0.7, 0.7), value_proj: Strength | None = (0.4, 0.4),
) -> nn.Module:  # fmt: skip
    """Return an attention module with mimetic initialization: its initial weights resemble those of trained models. A token
    attends to tokens that are similar to itself, and the product of the value and output weights is noise minus a multiple of
    the identity matrix. `attention` is the class of the module, which is called with `dim` and `heads`.

    `query_key` and `value_proj` are pairs: the strengths of the noise and of the identity matrix. None keeps the usual
    initialization of these weights. Only the weights of `qkv` and `proj` differ from those of `attention`. A `ViT` draws them
    again from its seed. A model of your own that initializes its weights must call `module.reset_parameters()` afterwards.

    Paper    Trockman, Kolter 2023, arXiv:2305.09828. For each head the product of the query and key maps is the best
             approximation of its rank to a Z + b I, and the product of the value and output maps is a Z - b I, with a Z of its
             own and (a, b) = `query_key` and `value_proj`. Z has entries N(0, 1 / dim). Both factors come from one singular
             value decomposition, and share the singular values equally.
    Off      `attention` itself.
    Departs  Public code multiplies the two factors in the wrong order, which keeps the eigenvalues but not the product; here
             the products are exact. The largest entry of each left singular vector is positive, so that a seed gives the same
             weights on all machines. The paper also replaces learned positions by fixed ones; set `position=SinCos2d` for this.

    With wide heads, a token attends almost only to itself at the start: with 64 channels or more, try `query_key=(0.4, 0.4)`.
    With a LayerScale that starts near 0, the initialization of the values has little effect.

    Raises   ValueError for an attention without linear maps `qkv` and `proj`, for `DifferentialAttention`, if the heads
             together are not as wide as the tokens, for `query_key` with a mask that keeps tokens from attending to themselves
             (`LocalityAttention`), if a strength is not a pair of numbers of at least 0, and for `query_key` without noise.
    """
    module = with_linear_maps(attention(dim, heads), dim)
    if query_key is not None and getattr(module, "mask_self", False):
        raise ValueError(
            f"{type(module).__name__} keeps tokens from attending to themselves, to which mimetic queries and keys lead them;"
            " expected query_key=None, for values and projection alone, or mask_self=False"
        )
    for option, strength in (("query_key", query_key), ("value_proj", value_proj)):
        check_strength(option, strength)
    module.reset_parameters = partial(draw_mimetic, module, query_key, value_proj)
    module.reset_parameters()
    return module


def with_linear_maps(module: Any, dim: int) -> Any:
    """Return an attention module unchanged if it has the linear maps `qkv` and `proj` of `Attention`, for tokens of width
    `dim`. Otherwise, raise ValueError.
    """
    name, maps = type(module).__name__, [getattr(module, linear, None) for linear in ("qkv", "proj")]
    if isinstance(module, DifferentialAttention) or not all(isinstance(linear, nn.Linear) for linear in maps):
        raise ValueError(f"{name} has no linear maps qkv and proj as Attention has; expected Attention or a similar class")
    if module.proj.in_features != dim:
        raise ValueError(f"the heads of {name} are {module.proj.in_features} wide together; expected {dim}, as the tokens")
    return module


def check_strength(name: str, strength: Any):
    """Raise ValueError unless `strength` is None or a pair of numbers of at least 0. Queries and keys need noise, because
    otherwise the attention maps of all heads would be the same.
    """
    if strength is None:
        return
    pair = isinstance(strength, tuple | list) and len(strength) == 2 and all(isinstance(s, int | float) for s in strength)
    if not pair or min(strength) < 0:
        raise ValueError(f"{name} is {strength!r}; expected None or two numbers of at least 0, for noise and identity")
    if name == "query_key" and not strength[0]:
        raise ValueError("query_key has no noise, so all heads would start with the same map; expected a first number above 0")


@torch.no_grad()
def draw_mimetic(module: Any, query_key: Strength | None, value_proj: Strength | None):
    """Draw the weights of an attention module by mimetic initialization, in place. `query_key` and `value_proj` are the
    strengths of the noise and of the identity matrix.
    """
    if reset := getattr(type(module), "reset_parameters", None):
        reset(module)
    if module.qkv.weight.is_meta:
        return
    zero_biases(module)
    dim = module.qkv.in_features
    queries, keys, _ = module.qkv.weight.view(3, module.heads, -1, dim)
    draw_values(module, value_proj)  # drawn first, so that they do not depend on `query_key`
    if query_key is not None:
        left, right = factors(noisy_identity(*query_key, (module.heads,), dim), queries.shape[1])
        queries.copy_(left.mT)
        keys.copy_(right.mT)


def zero_biases(module: Any):
    """Set the biases of the linear maps `qkv` and `proj` of an attention module to 0, as all biases of a `ViT` are."""
    for bias in (module.qkv.bias, module.proj.bias):
        if bias is not None:
            bias.zero_()


@torch.no_grad()
def draw_values(module: Any, strength: Strength | None):
    """Draw the value and output weights of an attention module by mimetic initialization, in place. `strength` has the
    strengths of the noise and of the identity matrix; None leaves these weights unchanged.
    """
    if strength is not None:
        dim = module.qkv.in_features
        left, right = factors(noisy_identity(strength[0], -strength[1], (), dim), dim)
        module.qkv.weight[2 * dim :].copy_(left.T)
        module.proj.weight.copy_(right)


def noisy_identity(noise: float, identity: float, shape: tuple[int, ...], dim: int) -> Tensor:
    """Return random matrices `noise` Z + `identity` I of shape (*shape, dim, dim), float64. Z has entries N(0, 1 / dim)."""
    normal = torch.randn(*shape, dim, dim, dtype=torch.float64) / dim**0.5
    return noise * normal + identity * torch.eye(dim, dtype=torch.float64)


def factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two matrices L and R of shape (..., n, rank). L times the transpose of R is the best approximation of `matrix`
    (..., n, n) with this rank. The columns of both are orthogonal, and their squared lengths are the largest singular values.

    The common sign of a column of L and of R is arbitrary. Here the largest entry of each column of L is positive.
    """
    u, s, vh = torch.linalg.svd(matrix)
    u, v = u[..., :rank], vh.mT[..., :rank]
    sign = u.gather(-2, u.abs().argmax(-2, keepdim=True)).sign()
    root = s[..., None, :rank].sqrt()
    return sign * u * root, sign * v * root


# Impulse initialization

NEIGHBORS = ((0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1))  # (rows, columns) from a query
IMPULSE, NOISE, CUT = 1_000.0, 1.8, 6.0  # target logits: value for the neighbor; std and largest value of the noise elsewhere


def impulse_start(
    dim: int, heads: int, *, attention: Callable = Attention,
    strength: float = 7.0, value_proj: Strength | None = (0.4, 0.4),
) -> nn.Module:  # fmt: skip
    """Return an attention module with impulse initialization (structured initialization): at the start of training, each head
    attends to one neighbor of each patch, like one entry of a 3 x 3 convolution kernel. The first head attends to the patch
    itself, the next four to the patches above, right, left and below, and further heads to the diagonal neighbors.

    The query and key weights are computed from the learned position embeddings of the model (`Learned`). `attention` is the
    class of the module, which is called with `dim` and `heads`. `strength` is the norm of the query weights and of the key
    weights of a head; with a larger norm, a head gives its neighbor a larger attention weight. `value_proj` is the same option
    as in `mimetic_start`. Only the weights of `qkv` and `proj` differ from those of `attention`. In a model of your own, call
    `module.reset_parameters()` and then `module.start_from_positions(position)` with a `Learned` module. Until then, the query
    and key weights are not those of the paper.

    It suits models in which the width of a head is at least the number of patches. A narrower head cannot distinguish all
    positions, and attends to the neighbor and to the patches around it.

    Paper    Zheng et al. 2025, arXiv:2505.19985, the closed form. P are the normalized position embeddings, and M the target
             logits of a head: 1,000 where the key is the neighbor of the query, elsewhere noise. The product of the query and
             key maps is P+ M P+^T, approximated with the rank of a head, where P+ is a pseudo-inverse of P. Both maps are
             divided by their norm and multiplied by 7. Values and output projection are those of mimetic initialization.
    Off      `attention` itself.
    Departs  The positions of `Learned` have std 1 from the start. timm's have 0.02, and the authors multiply them by 18.
    Raises   ValueError for an attention without linear maps `qkv` and `proj`, for `DifferentialAttention`, if the heads
             together are not as wide as the tokens, for a mask that keeps tokens from attending to themselves
             (`LocalityAttention`), for a `strength` that is not above 0, and in a model without learned positions.
    """
    module = with_linear_maps(attention(dim, heads), dim)
    if getattr(module, "mask_self", False):
        raise ValueError(
            f"{type(module).__name__} keeps tokens from attending to themselves, as the first head would; expected"
            " mask_self=False, or Attention"
        )
    if not isinstance(strength, int | float) or isinstance(strength, bool) or not strength > 0:
        raise ValueError(f"strength is {strength!r}; expected a number above 0")
    check_strength("value_proj", value_proj)
    module.reset_parameters = partial(draw_impulse, module, value_proj)
    module.start_from_positions = partial(fit_impulse, module, strength)
    return module


@torch.no_grad()
def draw_impulse(module: Any, value_proj: Strength | None):
    """Draw the weights of an attention module, in place, and a seed for the noise of its queries and keys. `fit_impulse`
    computes the query and key weights later, when the position embeddings of the model have been drawn.
    """
    if reset := getattr(type(module), "reset_parameters", None):
        reset(module)
    if not module.qkv.weight.is_meta:
        zero_biases(module)
        draw_values(module, value_proj)
        module.noise_seed = int(torch.randint(2**31, ()))


@torch.no_grad()
def fit_impulse(module: Any, strength: float, position: Any):
    """Compute the query and key weights of an attention module by impulse initialization, in place. `position` is the module
    of the model that adds position embeddings, or None.
    """
    if not isinstance(getattr(position, "table", None), nn.Parameter):
        name = "no positions" if position is None else type(position).__name__
        raise ValueError(f"impulse_start computes weights from learned positions and the model has {name}; expected Learned")
    if module.qkv.weight.is_meta:
        return
    dim, grid = module.qkv.in_features, position.grid
    queries, keys, _ = module.qkv.weight.view(3, module.heads, -1, dim)
    patches = position.table[len(position.table) - grid[0] * grid[1] :].double().cpu()
    inverse = pseudo_inverse(F.layer_norm(patches, (dim,), eps=1e-6), queries.shape[1])
    generator = torch.Generator().manual_seed(module.noise_seed)
    for head in range(module.heads):
        target = target_logits(grid, NEIGHBORS[head % len(NEIGHBORS)], generator)
        left, right = factors(inverse @ target @ inverse.T, queries.shape[1])
        queries[head] = strength * (left / left.norm()).T
        keys[head] = strength * (right / right.norm()).T


def target_logits(grid: tuple[int, int], offset: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return logits with which each patch of `grid` (rows, columns) attends to its neighbor at `offset` (rows, columns), shape
    (patches, patches), float64. All other logits are noise. A patch without this neighbor has noise only.
    """
    patches = grid[0] * grid[1]
    logits = torch.empty(patches, patches, dtype=torch.float64, device=generator.device)
    nn.init.trunc_normal_(logits, std=NOISE, a=-CUT, b=CUT, generator=generator)
    for row in range(grid[0]):
        for column in range(grid[1]):
            to_row, to_column = row + offset[0], column + offset[1]
            if 0 <= to_row < grid[0] and 0 <= to_column < grid[1]:
                logits[row * grid[1] + column, to_row * grid[1] + to_column] = IMPULSE
    return logits


def pseudo_inverse(positions: Tensor, rank: int) -> Tensor:
    """Return a pseudo-inverse of position embeddings (patches, width), shape (width, patches). Only the `rank` largest singular
    values are inverted.
    """
    u, s, vh = torch.linalg.svd(positions, full_matrices=False)
    kept = slice(min(rank, int((s > 1e-9 * s[0]).sum())))
    return vh[kept].T / s[kept] @ u[:, kept].T
