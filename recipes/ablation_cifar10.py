"""Do the results of `ablation` on MNIST hold for the photos of CIFAR-10?

Paper     Each arm is one technique; its page in the documentation names its paper.

Setup     Data: CIFAR-10 with 100 and 1,000 labels, 10,000 test images. All arms of the recipe `ablation`, with its settings and
          8 seeds; the learning rates are those that were chosen on MNIST, and nothing was chosen on these images. The images
          are reduced from 32 to 28 pixels, so that the models stay the same. They are deformed like the digits and not
          mirrored, which is not the best choice for photos.

Expected  Every arm is weak, below 35% with 100 labels and below 50% with 1,000. Convolutions before the first block gain five
          points at 1,000 labels. Written before the runs.
"""

from functools import partial

from smallvit import at_size, carry_over, cifar10

RUNS = carry_over("ablation", partial(at_size, data=cifar10, size=28))
