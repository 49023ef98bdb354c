"""Muon for the matrices, AdamW for the rest (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[N, R, C] -> the nearest semi-orthogonal matrices, roughly, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.transpose(-2, -1) if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; equal shapes are worked on as one batch."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_shape(parameters, group["lr"], group["momentum"])

    def _step_shape(self, parameters: list[nn.Parameter], lr: float, momentum: float) -> None:
        updates = torch.stack([self._nesterov(p, momentum) for p in parameters])
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for parameter, update in zip(parameters, orthogonalise(updates), strict=True):
            parameter.add_(update, alpha=-lr * scale)

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def optimisers(model: nn.Module, matrix_lr: float, embedding_lr: float) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    embedding = {"params": [parameter for name, parameter in named if "embed" in name], "lr": embedding_lr}
    norms = {"params": [parameter for _, parameter in named if parameter.ndim == 1], "lr": embedding_lr / 10}
    return [
        Muon(matrices, matrix_lr),
        torch.optim.AdamW([embedding, norms], betas=(0.9, 0.95), weight_decay=0.0),
    ]
