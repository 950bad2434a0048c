"""smallvit summary: the shapes, parameters and multiply-adds of a model, layer by layer."""

import argparse
from typing import Any

import smallvit
from smallvit.recipe import find_recipe, load_recipe, only


def main(options: argparse.Namespace) -> int:
    """Print the layers of a model with their output shapes, parameters and multiply-adds (MACs). The model is that of a recipe
    file or a timm model. `options` are the arguments of the command line. Return the exit status 0.
    """
    try:
        path = find_recipe(options.model)
    except ValueError as error:
        model, image = timm_model(options, error)
    else:
        entry = only(load_recipe(path, old_options=True).RUNS, [f"arm={options.arm}"] if options.arm else [])[0]
        spec = entry.run.data().spec
        size = spec.size if options.image is None else (options.image, options.image)
        image = (options.channels or spec.channels, *size)
        model = entry.run.model(size, image[0], len(spec.classes))
        print(f"{path.stem}, {entry.arm}:")
    try:
        print(smallvit.summary(model, image))
    except (AssertionError, RuntimeError) as error:  # raised by timm models
        raise ValueError(f"{options.model} does not accept images of {' x '.join(map(str, image))}: {error}") from error
    return 0


def timm_model(options: argparse.Namespace, error: ValueError) -> tuple[Any, tuple[int, int, int]]:
    """Return a model of the timm library and its image shape (channels, height, width). The model has no weight values: its
    tensors are on the device "meta" and only have shapes. `options` are the command-line arguments with the name of the model.
    If timm has no such model, ValueError is raised with the text of `error`, which says why the name is no recipe.

    A plain ViT is returned as a smallvit `ViT`.
    """
    import timm
    import torch

    name = options.model
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"{error} (timm has no model of that name either)") from None
    if options.arm:
        raise ValueError(f"{name} is a timm model and has no arm {options.arm!r}; leave out --arm")
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise ValueError(f"timm does not say which images {name} expects; choose another model")
    channels, height, width = config.input_size
    size = (options.image or height, options.image or width)
    channels = options.channels or channels
    with torch.device("meta"):
        try:
            create = smallvit.like(name)
        except ValueError:  # not a plain ViT
            model = timm.create_model(name, in_chans=channels)
        else:
            model = create(size, channels, config.num_classes)
    return model, (channels, *size)
