"""Do the results of `ablation` on MNIST hold for microscope images of blood cells (BloodMNIST of MedMNIST)?

Paper     Each arm is one technique; its page in the documentation names its paper.

Setup     Data: BloodMNIST, 8 kinds of cells, with 100 and 1,000 labels, 3,421 test images; the file `data/bloodmnist.npz` from
          medmnist.com. All arms of the recipe `ablation`, with its settings and 8 seeds; the learning rates are those that were
          chosen on MNIST, and nothing was chosen on these images. The images have 28 pixels and three colors. They are deformed
          like the digits.

Expected  Convolutions before the first block gain two points at 1,000 labels. Other attentions and positions inside attention
          show no difference. Written before the runs.
"""

from functools import partial

from smallvit import arrays, carry_over

RUNS = carry_over("ablation", partial(arrays, path="data/bloodmnist.npz"))
