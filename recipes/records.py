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
          other cores, and 40 runs with stroke widths, 50 minutes on two cores.

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

Found     The accuracy of "small ViT" is 96.14% [95.06, 97.23] at 100 labels, 98.37% [98.18, 98.55] at 500 and 98.70% [98.49,
          98.92] at 1,000, where the interval is for new seeds and new test images. At 10,000 labels it is 99.32% [99.17,
          99.47]. Of the numbers that were run later, it is 97.05% [96.43, 97.66] at 160 labels, 99.19% [99.03, 99.34] at 5,000,
          both as expected, and 99.37% [99.23, 99.51] with all labels, less than expected. Against the expectation, the goals at
          500 and at 1,000 labels are reached, the second one exactly; whether they are exceeded cannot be said, because both
          lie inside the intervals. No other goal is reached; only the one with all labels lies outside the interval. At 100
          labels the seeds, which also draw the labelled digits, range from 93.34% to 97.35% (SD 1.26). The deformed copies
          raise the mean to 96.39% at 100 labels, 98.96% at 1,000 and 99.52% with all, as expected or more. Four times as many
          images with all labels bring 99.47% [99.35, 99.60], as expected, and 99.61% with the deformed copies. That goal lies
          outside the interval, too. With other stroke widths, the accuracy is 96.44% [95.63, 97.25] at 100 labels, less than
          expected. It is 97.39% [96.72, 98.07] at 160, 98.82% [98.63, 99.01] at 1,000 and 99.29% [99.15, 99.42] at 5,000; all
          three are a little more than expected. At 10,000 it is 99.33% [99.18, 99.48], as expected. The goals at 160 and 1,000
          labels are reached, that at 5,000 is just missed, and those at 100 and 10,000 are not reached; all five lie inside the
          intervals. The deformed copies raise these means to 96.61%, 97.59%, 99.03%, 99.40% and 99.47%.

Limits    One model, and one length of training, chosen at 1,000 labels: with all labels each digit is seen only five times, or
          21 times in the longer runs; still longer training and larger models were not tried there. At 100 labels only a model
          with another tokenizer was tried, and later the stroke widths. Nothing is compared, so there is no verdict, and
          nothing says which part of the settings is needed. The arms were trained with different versions of smallvit and in
          different precision; the recipe `deformations` compares stroke widths in another ViT. No ensemble was trained. The
          goals come from results of other methods, with other draws of labelled digits. The learning rate is that of an earlier
          recipe and was not tuned for this model. After the runs, twice this rate was tried with stroke widths, 100 labels and
          4,800 steps: 95.95% on validation images in place of 96.20%.
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
