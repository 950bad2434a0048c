# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Add your own attention module
#
# This notebook takes an idea to a result in three steps: write the module, test it against the contract of its slot, and
# compare it with the baseline. No file of smallvit changes. (smallvit has the whole technique, too: `TalkingHeadsAttention`.)
#
# The idea is the first half of talking-heads attention (Shazeer et al. 2020, arXiv:2003.02436). In ordinary attention the heads
# are independent until their outputs are joined. Here a small learned matrix mixes the logits of the heads before the softmax.
# The matrix starts as the identity, so the first step equals ordinary attention. Any later difference comes from the mixing.
#
# Expected, before any run: little. With four heads and sixteen tokens there is little to mix.

# %%
# %matplotlib inline
import os
import sys
import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from IPython.display import Markdown

from smallvit import Attention, Merge, apply, attention_figure, compare, digits, load, load_recipe, markdown, read_records

torch.set_num_threads(1)
os.chdir(tempfile.mkdtemp())  # the recipe and its runs are written here; use a folder of your own to keep them
Path("recipes").mkdir(exist_ok=True)
LENGTH = "--smoke" if os.environ.get("SMALLVIT_SHORT") else ""  # the tests run this notebook with very few steps

# %% [markdown]
# ## Write it
#
# Write a new technique into a recipe file. A record stores the name of the class, and a class that was defined in a notebook
# cell could not be found again. The next cell therefore writes the file `recipes/talking.py`. It contains the class and, below
# it, the comparison as a list of runs.
#
# An attention module is created with `(dim, heads)`. Its options are keyword-only (after the `*`) and have plain values. It is
# called with tokens `x` of shape (batch, tokens, dim) and returns an `AttentionOutput`. Only the first field of that is
# required. `map` is needed for pictures of the attention, and `key` is needed by `Merge` to find similar tokens.
#
# With `reset_parameters`, the weights of the module come from their own random streams. Its `qkv` and `proj` then start with
# the same values as those of the baseline, because they have the same names.

# %%
# %%writefile recipes/talking.py
"""Does it help if the heads of an attention mix their logits before the softmax?

Paper     Shazeer et al. 2020, arXiv:2003.02436.

Setup     Data: scikit-learn's digits, 8 x 8 pixels, no download; 200 labelled images, 6 seeds.

Expected  Little, because there are only four heads and sixteen tokens. Written before the runs.
"""

from functools import partial

import torch
from torch import nn

from smallvit import Block, AttentionOutput, PatchEmbed, Run, ViT, ablate, augment, digits


class TalkingHeads(nn.Module):
    """Attention whose heads mix their logits before the softmax, by a learned matrix that starts as the identity."""

    def __init__(self, dim: int, heads: int, *, learn: bool = True):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.talk = nn.Parameter(torch.eye(heads), requires_grad=learn)

    def reset_parameters(self):
        nn.init.eye_(self.talk)

    def forward(self, x, size=None, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, dim // heads)
        logits = torch.einsum("bhqe,bhke,hg->bgqk", q * self.scale, k, self.talk)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        weights = weights if size is None else weights * size[:, None, None, :]  # a token of size 2 counts twice
        weights = weights if mask is None else weights * mask  # a masked token gets no attention, whatever the mixing does
        weights = weights / weights.sum(-1, keepdim=True)
        output = (weights @ v).transpose(1, 2).flatten(2)
        return AttentionOutput(self.proj(output), key=lambda: k.mean(1), map=lambda: weights)


vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), block=partial(Block, mlp_ratio=2.0), dim=48, depth=4, heads=4)
scratch = Run(data=digits, model=vit, augment=augment.digits(), steps=300, batch=32, lr=2e-3)

RUNS = ablate({"scratch": scratch, "talking": scratch.vary(attention=TalkingHeads)}, labels=[200], seeds=range(6))

# %% [markdown]
# ## Test it
#
# The contract of an attention module is written at the top of `smallvit/attention.py`. Each of the following cells tests one
# part of it. A cell without output has passed.
#
# `load_recipe` imports a recipe file. Do this before `load`, which has to find the class again.
#
# The output has as many tokens as the input, with the same width, for any number of tokens. A single token is the hard case.

# %%
recipe = load_recipe("recipes/talking.py")

torch.manual_seed(0)
x = torch.randn(2, 17, 48)
attention = recipe.TalkingHeads(48, 4)
assert attention(x).x.shape == (2, 17, 48)
assert attention(x[:, :1]).x.shape == (2, 1, 48)

# %% [markdown]
# Switched off, the module equals the baseline: with the identity as its matrix and the same weights, it returns what
# `Attention` returns. The later cells use a random matrix, so that they also test the mixing.

# %%
plain = Attention(48, 4)
plain.load_state_dict(attention.state_dict(), strict=False)  # everything except `talk`, which `Attention` does not have
torch.testing.assert_close(attention(x).x, plain(x).x)

# %% [markdown]
# `size` is the number of patches that each token stands for. All ones equal `size=None`. A token of size 2 counts as two equal
# tokens, and a token of size 0 counts as absent.

# %%
torch.nn.init.normal_(attention.talk)
ones = torch.ones(2, 17)
double, absent = ones.clone(), ones.clone()
double[:, -1], absent[:, -1] = 2, 0
torch.testing.assert_close(attention(x, ones).x, attention(x).x)
torch.testing.assert_close(attention(x, double).x, attention(torch.cat([x, x[:, -1:]], dim=1)).x[:, :-1])
torch.testing.assert_close(attention(x, absent).x[:, :-1], attention(x[:, :-1]).x)

# %% [markdown]
# `mask` is True where a query (row) may attend to a key (column). If no other token may attend to a token, changing that token
# changes no other output.

# %%
mask = torch.ones(17, 17, dtype=torch.bool)
mask[:-1, -1] = False
changed = x.clone()
changed[:, -1] += 1
torch.testing.assert_close(attention(changed, mask=mask).x[:, :-1], attention(x, mask=mask).x[:, :-1])

# %% [markdown]
# Every parameter gets a gradient, all gradients are finite, and each row of the attention map sums to 1.

# %%
attention(x).x.square().mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in attention.parameters())
torch.testing.assert_close(attention(x).map().sum(-1), torch.ones(2, 4, 17))

# %% [markdown]
# A copy has the same values in its own memory. This matters because `deepcopy` makes the moving averages of weights and the
# teachers.

# %%
copy = deepcopy(attention)
torch.testing.assert_close(copy(x).x, attention(x).x)
assert copy.talk.data_ptr() != attention.talk.data_ptr()

# %% [markdown]
# ## Compare it
#
# `smallvit run talking` trains every arm with every seed, on all cores, and the reference models as well. The next cell does
# this with the Python of this notebook. It takes a minute or two on one core. If you stop it, the next start continues from
# there.

# %%
# !{sys.executable} -m smallvit run talking {LENGTH} 2>&1 | cat

# %% [markdown]
# ## Read the result
#
# Each run has left a folder with its weights and its record. `compare` compares every arm with the baseline, seed by seed. For
# the same seed, both use the same labelled images in the same order with the same augmentation, and here even the same initial
# weights.

# %%
records = read_records("runs")
for row in compare(records).rows:
    print(f"{row.arm:28} {row.mean:.1%}   {row.verdict or row.role}")

# %% [markdown]
# In the run that is committed here no difference is shown, as expected. The warnings above say that both ViTs were probably not
# trained long enough, and that simple classifiers on raw pixels are more accurate. So it shows how to compare, and says little
# about talking heads.
#
# The whole report looks like those next to the committed recipes:

# %%
Markdown(markdown(records, title="talking", doc=recipe.__doc__))

# %% [markdown]
# ## Look inside
#
# Which heads did the model mix? `load` returns the trained model of a run. Row i and column j of the matrix say how much head i
# contributes to the logits of head j. Before training it is the identity. In the run that is committed here it stays close to
# it.

# %%
model = load(min(Path("runs").rglob("talking/seed0*"))).model
print(model.blocks[0].attention.talk.detach().numpy().round(2))

# %% [markdown]
# Other parts of the library work with the new module because it keeps the contract. Here `apply` adds token merging to the
# trained model (which uses `key`), and `attention_figure` draws what the class token attends to in the last block (which uses
# `map`).

# %%
images = digits().subset(labels=200, val=None, seed=0).val.take(slice(3))
attention_figure(apply(model, partial(Merge, r=4)), images)
