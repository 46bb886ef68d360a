"""A zoo of architectures: small networks of torch and transformers, random weights.

Files are cut by what networks take: words, words and words, images, sounds, anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.torch.zoo.encoders import ENCODERS
from tests.support.torch.zoo.images import IMAGES
from tests.support.torch.zoo.language_models import LANGUAGE_MODELS
from tests.support.torch.zoo.layers import LAYERS
from tests.support.torch.zoo.sounds import SOUNDS
from tests.support.torch.zoo.translators import TRANSLATORS

ZOO: dict[str, Callable[[], tuple[Any, Any]]] = {
    **ENCODERS,
    **LANGUAGE_MODELS,
    **TRANSLATORS,
    **IMAGES,
    **SOUNDS,
    **LAYERS,
}


def made(name: str, draw: int = 0) -> tuple[Any, Any]:
    """A module by its name in `ZOO`, in evaluation mode, and its examples; others for each draw."""
    torch.manual_seed(3 + draw)
    module, examples = ZOO[name]()
    return module.eval(), examples
