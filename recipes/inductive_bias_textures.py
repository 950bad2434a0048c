"""Do the results of `inductive_bias` on digits hold for color images of textured shapes, for which nothing was chosen?

Paper     Each arm is one technique; the recipe `inductive_bias` names its paper.

Setup     Data: `textured_shapes`, drawn by a program, 8 classes, with 100 and 1,000 labels, 10,000 test images, 8 seeds. All
          arms of the recipe `inductive_bias`, with its settings; the learning rates are those that were chosen on MNIST, and
          nothing was chosen on these images. The images are reduced from 32 to 28 pixels, so that the models stay the same.
          They are deformed like the digits, which keeps their classes.

Expected  Convolutions before the first block gain far more than on digits, because a pattern is local and occurs everywhere:
          more than 20 points at 1,000 labels, CCT's tokenizer more than the hybrid stem. One trial on validation images, when
          the data set was made, showed 47% for a plain ViT and 80% with CCT's tokenizer. The depth-wise convolution gains
          several points at 1,000 labels, and shifted patches as well. At 100 labels these gains are at most half as large,
          because the baseline is wrong on most images. Locality attention and both initializations show no difference, as on
          MNIST. The small CNN has the highest mean. Written before the runs.
"""

from functools import partial

from smallvit import at_size, carry_over, textured_shapes

RUNS = carry_over("inductive_bias", partial(at_size, data=textured_shapes, size=28))
