"""Do the results of `ablation` on MNIST hold for the images of clothes in Fashion-MNIST?

Paper     Each arm is one technique; its page in the documentation names its paper.

Setup     Data: Fashion-MNIST with 100 and 1,000 labels, 10,000 test images. All arms of the recipe `ablation`, with its
          settings and 8 seeds; the learning rates are those that were chosen on MNIST, and nothing was chosen on these images.
          The images have 28 pixels, as those of MNIST. They are deformed like the digits.

Expected  Convolutions before the first block gain one to two points. The deformations of digits gain less than on MNIST.
          Written before the runs.
"""

from smallvit import carry_over, fashion_mnist

RUNS = carry_over("ablation", fashion_mnist)
