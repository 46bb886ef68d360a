"""PyTorch's losses and optimizers, as they are: read, called and stepped without loading torch."""

from stitch.training.from_torch.called_losses import (
    GIVEN_LOSS,
    is_loss_call,
    loss_of,
    loss_of_call,
)
from stitch.training.from_torch.replaced_methods import owner_of, replace_methods, weakly
from stitch.training.from_torch.torch_optimizers import (
    GIVEN_OPTIMIZER,
    TorchOptimizer,
    is_torch_optimizer,
    parameter_names,
)

__all__ = [
    "GIVEN_LOSS", "GIVEN_OPTIMIZER", "TorchOptimizer", "is_loss_call", "is_torch_optimizer",
    "loss_of", "loss_of_call", "owner_of", "parameter_names", "replace_methods", "weakly",
]  # fmt: skip
