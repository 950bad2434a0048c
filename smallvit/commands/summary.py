"""smallvit summary: what comes out of a model, step by step."""

import argparse

from smallvit import like, summary
from smallvit.recipe import find_recipe, load_recipe, only


def main(chosen: argparse.Namespace) -> int:
    try:
        path = find_recipe(chosen.model)
    except ValueError as error:
        model, image = of_timm(chosen, error)
    else:
        run = only(load_recipe(path).RUNS, [f"arm={chosen.arm}"] if chosen.arm else [])[0]
        spec = run.data().spec
        size = spec.size if chosen.image is None else (chosen.image, chosen.image)
        image = (chosen.channels or spec.channels, *size)
        model = run.model(size, image[0], len(spec.classes))
        print(f"{path.stem}, {run.arm}:")
    try:
        print(summary(model, image))
    except (AssertionError, RuntimeError) as error:  # of a model that is not ours
        raise ValueError(f"{chosen.model} does not take images of {' x '.join(map(str, image))}: {error}") from error
    return 0


def of_timm(chosen: argparse.Namespace, error: ValueError) -> tuple:
    """A model of timm's without memory for its weights, as a `ViT` where it is one; and the image that it is for."""
    import timm
    import torch

    name = chosen.model
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"{error} (timm has no model of that name either)") from None
    if chosen.arm:
        raise ValueError(f"{name} is a model of timm's and has no arm {chosen.arm!r}; leave --arm out")
    cfg = timm.get_pretrained_cfg(name)
    size = cfg.input_size[1:] if chosen.image is None else (chosen.image, chosen.image)
    channels = chosen.channels or cfg.input_size[0]
    with torch.device("meta"):
        try:
            made = like(name)
        except ValueError:  # what is no plain ViT is shown as timm has it
            model = timm.create_model(name, in_chans=channels)
        else:
            model = made(size, channels, cfg.num_classes)
    return model, (channels, *size)
