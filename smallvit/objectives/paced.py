"""Paced: parts of a model that change as the run goes on are told how far it is."""

from torch import nn


def paced(model: nn.Module) -> list[nn.Module]:
    """The modules with a `progress` of their own, such as a reduction that begins gently."""
    return [module for module in model.modules() if isinstance(getattr(module, "progress", None), float)]


def tell(modules: list[nn.Module], progress: float):
    """Tell them the progress of the run, from 0 to 1."""
    for module in modules:
        module.progress = progress
