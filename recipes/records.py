"""How good can one small ViT be, with so many labelled digits and no other images?

Paper     Hassani et al. 2021 (CCT), arXiv:2104.05704. Jordan et al. 2024 (Muon), kellerjordan.github.io/posts/muon.

Setup     Data: MNIST with 100 to 10,000 labelled digits and with all 59,000 that are not used for validation, 10,000 test
          images, 8 seeds. One small ViT with the tokenizer of CCT (three convolutions, hidden width 32): 16 tokens, width 64, 4
          blocks, 4 heads, 164,000 parameters. It is trained with Muon for 9,600 steps of 32 deformed digits. The settings are
          the same at every number of labels. They were chosen on 5,000 validation images with other seeds, in four recorded
          trials at 1,000 labels and two at 100 (`records.trials.jsonl`), and one at 1,000 whose record was lost.
          `augmented_accuracy` classifies each test image together with 16 deformed copies of it. The runs with 160, 5,000 and
          all labels are in bf16, the others in fp32. "Small ViT (longer)" is trained for 19,200 steps of 64 digits, in fp32. In
          "small ViT (stroke widths)", the strokes of half of the deformed digits are also made thicker or thinner, by up to 1.1
          pixels, in bf16. It was chosen in eight trials at 100 labels, with 4,800 steps and other seeds. "Small ViT (longer,
          stroke widths)" has both changes, in bf16. Cost: 56 runs, two hours on two CPU cores, 8 longer runs, 83 minutes on two
          other cores, 40 runs with stroke widths, 50 minutes on two cores, and 32 longer runs with stroke widths, 100 minutes
          on two cores beside other programs.

Expected  The accuracy is 96.0% at 100 labels, 98.0% at 500, 98.5% at 1,000, 99.2% at 5,000 and 99.3% at 10,000. The goals,
          which were set from published results of any method, were 96.8, 98.3, 98.7, 99.3 and 99.45%; none of them is reached.
          The deformed copies bring 0.1 to 0.2 points. Written before the runs. Three numbers of labels were run later, with
          these expectations before their runs: 97.0% at 160 labels and 99.2% at 5,000, as the results beside them suggest, and
          99.5% with all labels, because 9,600 steps show each digit only five times. The goals were 97.2, 99.3 and 99.70%.
          Training with all labels on four times as many images was added after these: each digit is shown 21 times. It was
          chosen without trials. Expected before its runs: 99.50%, below the goal. "Small ViT (stroke widths)" was added last.
          Expected before its runs: 96.6% at 100 labels, 97.3% at 160 and 98.7% at 1,000, so a gain only where labels are
          fewest; the goal at 160 labels is reached. When these results were known, 5,000 and 10,000 labels were added. Expected
          before their runs: 99.2% and 99.35%, below the goals. "Small ViT (longer, stroke widths)" was added after all these
          results, without trials. Expected before its runs: 99.35% at 5,000 labels, so the goal is reached, and 99.40% at
          10,000, below the goal. While these runs were trained, 100 labels and all labels were added to this arm. Expected:
          96.5% and 99.52%, both below the goals.

Found     Three goals are reached, against the first expectation: that at 500 labels by "small ViT", 98.37% [98.18, 98.55], and
          those at 160 and 1,000 labels with stroke widths, 97.39% [96.72, 98.07] and 98.82% [98.63, 99.01]. The intervals are
          for new seeds and new test images. Whether the goals are exceeded cannot be said, because all three lie inside the
          intervals. The other goals are not reached. Those at 100, 5,000 and 10,000 labels lie inside the intervals of the
          highest means: 96.70% [95.84, 97.57] at 100 and 99.40% [99.27, 99.53] at 10,000 in longer training with stroke widths,
          and 99.29% [99.15, 99.42] at 5,000 with stroke widths alone. With all labels the highest mean is 99.51% [99.39,
          99.63], in longer training with stroke widths; the goal lies outside the interval. "Small ViT" has 96.14% [95.06,
          97.23] at 100 labels, 97.05% [96.43, 97.66] at 160, 98.70% [98.49, 98.92] at 1,000, 99.19% [99.03, 99.34] at 5,000 and
          99.32% [99.17, 99.47] at 10,000, as expected or more, and 99.37% [99.23, 99.51] with all labels, less than expected.
          At 100 labels the seeds, which also draw the labelled digits, range from 93.34% to 97.35% (SD 1.26). Stroke widths
          have 96.44% [95.63, 97.25] at 100 labels, less than expected. At 160, 1,000 and 5,000 labels they have a little more
          than expected, and at 10,000, 99.33% [99.18, 99.48], as expected. Longer training has 99.47% [99.35, 99.60] with all
          labels, as expected. With stroke widths it has 99.28% [99.15, 99.41] at 5,000 labels, less than expected and no more
          than with a quarter of the images. At 10,000 labels and with all labels it is as expected, and at 100 labels more than
          expected; there the seeds range from 95.15% to 97.93%. The deformed copies raise the mean of "small ViT" to 96.39% at
          100 labels, 98.96% at 1,000 and 99.52% with all labels. With stroke widths they raise it to 96.61%, 97.59%, 99.03%,
          99.40% and 99.47%, in longer training to 99.61%, and with both to 96.99% at 100 labels, 99.45% at 5,000, 99.54% at
          10,000 and 99.63% with all.

Limits    One model, and two lengths of training: with all labels each digit is seen only five times, or 21 times in the longer
          runs. Still longer training was not tried. A larger model was tried once, after the runs, with all labels, stroke
          widths and 9,600 steps of 64 digits: with width 96 in place of 64, the accuracy on validation images is 99.42% in
          place of 99.38%, for more than twice the time. Longer training was not tried at 160, 500 and 1,000 labels, nor stroke
          widths at 500. At 100 labels only a model with another tokenizer was tried, and later the stroke widths. Nothing is
          compared, so there is no verdict, and nothing says which part of the settings is needed. The arms were trained with
          different versions of smallvit and in different precision; the recipe `deformations` compares stroke widths in another
          ViT. No ensemble was trained. The goals come from results of other methods, with other draws of labelled digits. The
          learning rate is that of an earlier recipe and was not tuned for this model. After the runs, twice this rate was tried
          with stroke widths, 100 labels and 4,800 steps: 95.95% on validation images in place of 96.20%. With 500 labels, all
          eight runs of "small ViT" were trained again later, on another processor: since rounding differs there, the mean is
          98.32% in place of 98.37%.
"""

from functools import partial

from smallvit import ConvTokenizer, Muon, ablate, accuracy, augment, augmented_accuracy, mnist_baseline

small_vit = mnist_baseline().vary(
    tokenizer=partial(ConvTokenizer, layers=3, hidden=32),
    optimizer=Muon,
    lr=5e-3,
    steps=9_600,
    evaluators=(accuracy, partial(augmented_accuracy, augment=augment.digits(0.5), copies=16)),
)

longer = small_vit.vary(steps=19_200, batch=64)
stroke_widths = small_vit.vary(augment=(*augment.digits(), augment.StrokeWidth()))
longer_widths = longer.vary(augment=stroke_widths.augment)

RUNS = (
    ablate({"small ViT": small_vit}, labels=[100, 160, 500, 1_000, 5_000, 10_000, None], references=False)
    + ablate({"small ViT (longer)": longer}, labels=[None], references=False)
    + ablate({"small ViT (stroke widths)": stroke_widths}, labels=[100, 160, 1_000, 5_000, 10_000], references=False)
    + ablate({"small ViT (longer, stroke widths)": longer_widths}, labels=[100, 5_000, 10_000, None], references=False)
)
