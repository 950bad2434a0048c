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
# # An attention of your own
#
# From an idea to a verdict: write the module, test it against the contract of its slot, compare it. Nothing inside smallvit changes.
#
# The idea is talking heads (Shazeer et al. 2020, arXiv:2003.02436), its first half. The heads of an attention do not know of each other
# until their outputs are joined. Here they mix their logits before the softmax, by a small learned matrix. It starts as the identity,
# so that at the first step it *is* ordinary attention, and every difference that comes is the mixing's.
#
# Expected, before any run: little. Four heads on sixteen tokens have little to say to each other.

# %%
# %matplotlib inline
import json
import os
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from IPython.display import Markdown
from safetensors.torch import load_file

from smallvit import Attention, Merge, apply, attention_figure, compare, digits, markdown

torch.set_num_threads(1)
os.chdir(tempfile.mkdtemp())  # where the recipe and its runs are written; in a folder of yours they are kept
Path("recipes").mkdir(exist_ok=True)
LENGTH = "--smoke" if os.environ.get("SMALLVIT_SHORT") else ""  # the tests ask whether all of this runs, not what comes of it

# %% [markdown]
# ## Write it
#
# Techniques live in recipe files: a record names the class it was made with, and a class that was typed into a notebook could not be found
# again. So the next cell is a file, `recipes/talking.py`: the class, and below it the question as a list of runs.
#
# An attention is made with `(dim, heads)`; its knobs come after the `*`, with plain values. It is called with tokens `x`, b n d, and returns
# `AttentionOutput`, of which only the first field is a must. `map` lets pictures see the attention, `key` lets `Merge` find tokens that are alike.
# With `reset_parameters` its weights are drawn from streams of their own: `qkv` and `proj` then start equal to those of the baseline's,
# which bear the same names.

# %%
# %%writefile recipes/talking.py
"""Does it help if the heads of an attention talk before they look?

Paper   Shazeer et al. 2020, arXiv:2003.02436.    Data  scikit-learn's digits, 8 x 8 pixels: no download.
"""

from functools import partial

import torch
from torch import nn

from smallvit import Block, AttentionOutput, PatchEmbed, Run, ViT, ablate, augment, digits


class TalkingHeads(nn.Module):
    """Attention whose heads mix their logits before the softmax, by a matrix that starts as the identity."""

    def __init__(self, dim: int, heads: int, *, learn: bool = True):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.talk = nn.Parameter(torch.eye(heads), requires_grad=learn)

    def reset_parameters(self):
        nn.init.eye_(self.talk)

    def forward(self, x, size=None, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # b h n e each
        logits = torch.einsum("bhqe,bhke,hg->bgqk", q * self.scale, k, self.talk)
        seen = (logits - logits.amax(-1, keepdim=True)).exp()
        seen = seen if size is None else seen * size[:, None, None, :]  # a token of size 2 counts as two,
        seen = seen if mask is None else seen * mask  # one out of sight not at all: whatever the heads have said
        seen = seen / seen.sum(-1, keepdim=True)
        mixed = (seen @ v).transpose(1, 2).flatten(2)
        return AttentionOutput(self.proj(mixed), key=lambda: k.mean(1), map=lambda: seen)


vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), block=partial(Block, mlp_ratio=2.0), dim=48, depth=4, heads=4)
scratch = Run(data=digits, model=vit, augment=augment.digits(), steps=300, batch=32, lr=2e-3)

RUNS = ablate({"scratch": scratch, "talking": scratch.vary(attention=TalkingHeads)}, labels=[200], seeds=range(6))

# %% [markdown]
# ## Test it
#
# The contract stands at the top of `smallvit/attention.py`. Each of its sentences is a cell here; a cell that passes says nothing.
#
# As many tokens come out as went in, of the same width, for any number of them. One is the hard case.

# %%
from recipes.talking import TalkingHeads

torch.manual_seed(0)
x = torch.randn(2, 17, 48)
attention = TalkingHeads(48, 4)
assert attention(x).x.shape == (2, 17, 48)
assert attention(x[:, :1]).x.shape == (2, 1, 48)

# %% [markdown]
# Switched off, it is the baseline: with the identity as its matrix it gives what `Attention` gives with the same weights. From here on the
# heads do talk, or the rest would be tested on nothing new.

# %%
plain = Attention(48, 4)
plain.load_state_dict(attention.state_dict(), strict=False)  # all but `talk`, which it does not have
torch.testing.assert_close(attention(x).x, plain(x).x)

torch.nn.init.normal_(attention.talk)

# %% [markdown]
# `size` says how many patches a token stands for. All ones is the same as none; a token of size 2 counts as two equal tokens; a token of
# size 0 is gone.

# %%
ones = torch.ones(2, 17)
double, gone = ones.clone(), ones.clone()
double[:, -1], gone[:, -1] = 2, 0
torch.testing.assert_close(attention(x, ones).x, attention(x).x)
torch.testing.assert_close(attention(x, double).x, attention(torch.cat([x, x[:, -1:]], dim=1)).x[:, :-1])
torch.testing.assert_close(attention(x, gone).x[:, :-1], attention(x[:, :-1]).x)

# %% [markdown]
# `mask` is True where a query (row) may look at a key (column): a token that nobody may see but itself moves nobody else.

# %%
mask = torch.ones(17, 17, dtype=torch.bool)
mask[:-1, -1] = False
moved = x.clone()
moved[:, -1] += 1
torch.testing.assert_close(attention(moved, mask=mask).x[:, :-1], attention(x, mask=mask).x[:, :-1])

# %% [markdown]
# Every parameter learns, all gradients are finite, and the map is one: each row sums to 1.

# %%
attention(x).x.square().mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in attention.parameters())
torch.testing.assert_close(attention(x).map().sum(-1), torch.ones(2, 4, 17))

# %% [markdown]
# A copy is another module with the same weights: running means of weights and teachers are made by `deepcopy`.

# %%
copy = deepcopy(attention)
torch.testing.assert_close(copy(x).x, attention(x).x)
assert copy.talk.data_ptr() != attention.talk.data_ptr()

# %% [markdown]
# ## Compare it
#
# The command line trains every arm with every seed, on all cores, and the references beside them: `smallvit run talking`, here with the
# Python of this notebook. It takes a minute or two on one core. Stopped, it goes on where it was.

# %%
# !{sys.executable} -m smallvit run talking {LENGTH} 2>&1 | cat

# %% [markdown]
# ## Read it
#
# Each run has left a record. `compare` sets every arm against the baseline, seed by seed: the same seed means the same labelled images in the
# same order with the same augmentation, and here even the same start.

# %%
records = [json.loads(path.read_text()) for path in sorted(Path("runs").rglob("record.json"))]
for row in compare(records).rows:
    print(f"{row.arm:28} {row.mean:.1%}   {row.verdict or row.role}")

# %% [markdown]
# The whole report, as it stands beside the committed recipes.

# %%
Markdown(markdown(records, title="talking", doc="Does it help if the heads talk to each other?"))

# %% [markdown]
# ## Look at it
#
# What have the heads said? The weights of a run are plain safetensors. A row is who speaks, a column who listens; without training it
# would be the identity.

# %%
from recipes.talking import scratch

folder = min(Path("runs").rglob("talking/seed0*"))
data = digits()
model = scratch.vary(attention=TalkingHeads).model(data.spec.size, data.spec.channels, len(data.spec.classes))
model.load_state_dict(load_file(folder / "model.safetensors"))
print(model.blocks[0].attention.talk.detach().numpy().round(2))
