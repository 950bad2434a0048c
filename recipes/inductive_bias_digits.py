"""Do the results of `inductive_bias` on MNIST hold for the digits of scikit-learn, which are smaller and far fewer?

Paper     Each arm is one technique; the recipe `inductive_bias` names its paper.

Setup     Data: scikit-learn's handwritten digits with 100 labels, 500 test images, 8 seeds. All arms of the recipe
          `inductive_bias`, with its settings; the learning rates are those that were chosen on MNIST, and nothing was chosen on
          these images. The images are enlarged from 8 to 28 pixels, so that the models stay the same. 1,000 labels were planned
          as well, and not run: there are 1,797 digits in all.

Expected  The order of the arms is that on MNIST, with smaller differences, because the digits are easier: the baseline reaches
          95% with 100 labels and 98% with 1,000. Convolutions before the first block gain one point at 100 labels and less than
          half a point at 1,000. With 500 test images, only differences of more than a point can get a verdict, so nearly all
          comparisons are inconclusive. Written before the runs.
"""

from functools import partial

from smallvit import at_size, carry_over, digits

RUNS = carry_over("inductive_bias", partial(at_size, data=digits, size=28), labels=[100])
