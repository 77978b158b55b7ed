"""K runs of one shape trained as one model: every parameter with a leading replica axis, one fused optimiser step for all.

All parameters are views [K, *shape] of one buffer [K, P]; their gradients are gathered into its twin. A step of AdamW is then a few
operations on two matrices: what differs by tensor (the parametrization) is a row [P], what differs by run (learning rate,
decay, clipping) a column [K]. Rows never meet, so a run that diverges can't touch the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn

from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError
from scalinglab.train.jobs import shared
from scalinglab.train.model import Model
from scalinglab.train.roles import retag, tags
from scalinglab.train.scaling import build, draw, groups
from scalinglab.train.team import Team

BUFFERS = ("params", "moment1", "moment2")  # of a state: the tensors with a number for every parameter


class Stack:
    """K runs as one model and one optimiser.

    Parameters
    ----------
    configs : sequence of RunConfig
        Runs that differ in seed, lr, optimizer.weight_decay, optimizer.grad_clip and labels only.
    device : str or torch.device

    Attributes
    ----------
    model : Model
        Takes tokens [K, b, t].
    params, grads, moment1, moment2 : Tensor [K, P]
    alive : Tensor of bool [K]
        False once a loss or a gradient was not finite: such a run keeps the weights it had before that step.
    step : int
        Optimiser steps taken.
    size : int
        Parameters of one run.

    Raises
    ------
    ConfigError
        The runs differ in something else.
    """

    def __init__(self, configs: Sequence[RunConfig], *, device: str | torch.device = "cpu") -> None:
        check_stackable(configs)
        self.configs, first = tuple(configs), configs[0]
        self.model = build(first, device=device)
        shapes = {name: param.shape for name, param in self.model.named_parameters()}
        sizes = [shape.numel() for shape in shapes.values()]
        first_param = next(self.model.parameters())
        self.params = torch.empty(len(configs), sum(sizes), dtype=first_param.dtype, device=device)
        self.size = self.params.shape[1]
        self.grads, self.moment1, self.moment2 = (torch.zeros_like(self.params) for _ in range(3))
        for row, config in zip(self.params, configs, strict=True):
            draw(self.model, config)
            torch.cat([p.detach().flatten() for p in self.model.parameters()], out=row)
        self._set_rates(sizes)
        self.views = _replace_parameters(self.model, shapes, self.params)
        self.alive = torch.ones(len(configs), dtype=torch.bool, device=device)
        self.step = 0

    def backward(self, losses_k: Tensor) -> None:
        """Gradients of every run's own loss [K] into `grads`."""
        losses_k.sum().backward()
        torch.cat([_taken(view).flatten(1) for view in self.views], dim=1, out=self.grads)

    def average(self, team: Team) -> None:
        """Replace `grads` by their mean over a team whose processes have each their own sequences."""
        team.average(self.grads)

    def update(self, losses_k: Tensor, scale: float) -> Tensor:
        """One AdamW step from `grads`; returns their norms [K] before clipping.

        Parameters
        ----------
        losses_k : Tensor [K]
            Losses of this step; a run whose loss or gradient is not finite is frozen as it is.
        scale : float
            Share of the peak learning rate, in [0, 1]. Weight decay follows it.
        """
        with torch.no_grad():
            norms_k = torch.linalg.vector_norm(self.grads, dim=1)
            healthy_k = torch.isfinite(losses_k) & torch.isfinite(norms_k)
            if not bool(healthy_k.all()):
                self.alive &= healthy_k
                self._freeze()
            self.step += 1
            self._adamw(norms_k, scale)
        return norms_k

    def weights(self, replica: int) -> dict[str, Tensor]:
        """State dict of one run, on the CPU; it loads into the model that `scaling.build` makes."""
        return {name: p[replica].detach().cpu().clone() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor | int]:
        """All that continues the training exactly, but for the data."""
        return {
            "params": self.params, "moment1": self.moment1, "moment2": self.moment2, "alive": self.alive, "step": self.step
        }  # fmt: skip

    def load_state(self, state: dict[str, Tensor | int]) -> None:
        """Go on from a `state` of the same stack."""
        for name in (*BUFFERS, "alive"):
            getattr(self, name).copy_(state[name])
        self.step = int(state["step"])
        self._freeze()

    def _set_rates(self, sizes: list[int]) -> None:
        """What the parametrization does to each parameter (rows [P]) and what each run asks for (columns [K])."""
        rates = rates_by_tensor(self.model, self.configs[0])
        each = rates.repeat_interleave(torch.tensor(sizes), dim=1).to(self.params)
        self.lr_p, self.decay_p, self.eps_p = (row.contiguous() for row in each)
        self.lr_k, self.decay_k, self.clip_k = rates_by_run(self.configs, like=self.params)

    def _freeze(self) -> None:
        self.grads[~self.alive] = 0.0
        self.lr_k[~self.alive] = 0.0

    def _adamw(self, norms_k: Tensor, scale: float) -> None:
        betas = self.configs[0].optimizer.beta1, self.configs[0].optimizer.beta2
        factor_k = (self.clip_k / (norms_k + 1e-6)).clamp_(max=1.0).where(self.alive, 0.0)
        if self.model.kernels is not None:
            self.model.kernels.adamw_(
                self.params, self.grads, self.moment1, self.moment2, step=self.step, betas=betas, lr_p=self.lr_p,
                weight_decay_p=self.decay_p, eps_p=self.eps_p, lr_k=self.lr_k * scale, weight_decay_k=self.decay_k,
                clip_k=factor_k,
            )  # fmt: skip
            return
        adamw_(
            self.params, self.grads, self.moment1, self.moment2, step=self.step, betas=betas, lr_p=self.lr_p,
            decay_p=self.decay_p, eps_p=self.eps_p, lr_k=self.lr_k * scale, decay_k=self.decay_k, clip_k=factor_k,
        )  # fmt: skip


def rates_by_tensor(model: Model, config: RunConfig) -> Tensor:
    """What the parametrization does to each tensor, as float64 [3, tensors]: factors on lr and weight decay, and epsilon."""
    unit = msgspec.structs.replace(config.optimizer, weight_decay=1.0, decay="coupled")
    tensors = groups(model, msgspec.structs.replace(config, lr=1.0, optimizer=unit))
    return torch.tensor([(g.lr, g.weight_decay, g.eps) for g in tensors], dtype=torch.float64).T


def rates_by_run(configs: Sequence[RunConfig], *, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What each run asks for, [K] each, in dtype and place of a tensor: peak lr, coupled weight decay, gradient norm to clip at."""
    asked = [
        (
            c.lr,
            c.optimizer.weight_decay / (c.lr if c.optimizer.decay == "independent" else 1.0),
            c.optimizer.grad_clip,
        )
        for c in configs
    ]
    lr_k, decay_k, clip_k = (column.contiguous() for column in torch.tensor(asked, dtype=torch.float64).to(like).T)
    return lr_k, decay_k, clip_k


def adamw_(
    params_kp: Tensor,
    grads_kp: Tensor,
    moment1_kp: Tensor,
    moment2_kp: Tensor,
    *,
    step: int,
    betas: tuple[float, float],
    lr_p: Tensor,
    decay_p: Tensor,
    eps_p: Tensor,
    lr_k: Tensor,
    decay_k: Tensor,
    clip_k: Tensor,
) -> None:
    """One step of AdamW in place: what differs by parameter is a row [P] or [1], what differs by run a column [K].

    `clip_k` is a factor on the gradients; `step` counts from 1.
    """
    corrections = [1 - beta**step for beta in betas]
    grads_kp.mul_(clip_k.unsqueeze(1))
    rates_kp = torch.outer(lr_k, lr_p)
    params_kp.addcmul_(params_kp, torch.outer(decay_k, decay_p).mul_(rates_kp), value=-1)
    moment1_kp.lerp_(grads_kp, 1 - betas[0])
    moment2_kp.mul_(betas[1]).addcmul_(grads_kp, grads_kp, value=1 - betas[1])
    step_kp = moment2_kp.sqrt().div_(corrections[1] ** 0.5).add_(eps_p)
    torch.div(moment1_kp, step_kp, out=step_kp)
    params_kp.addcmul_(step_kp, rates_kp, value=-1 / corrections[0])


def check_stackable(configs: Sequence[RunConfig]) -> None:
    """Raise ConfigError unless the runs can be trained as one model."""
    if not configs:
        raise ConfigError("a stack needs at least one run")
    first = shared(configs[0])
    for config in configs[1:]:
        if (other := shared(config)) != first:
            field = next(f for f in first.__struct_fields__ if getattr(first, f) != getattr(other, f))
            raise ConfigError(
                f"runs {configs[0].run_id} and {config.run_id} differ in {field}; a stack's runs may differ in seed, lr, "
                "weight decay and clipping only"
            )


def _replace_parameters(model: Model, shapes: dict[str, torch.Size], params_kp: Tensor) -> list[nn.Parameter]:
    """Put views [K, *shape] of the buffer in the place of a model's parameters, and return them in their order."""
    known, at, views = tags(model), 0, []
    for name, shape in shapes.items():
        view = nn.Parameter(params_kp[:, at : at + shape.numel()].view(len(params_kp), *shape))
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = view
        views.append(view)
        at += shape.numel()
    retag(model, known)
    return views


def _taken(view: nn.Parameter) -> Tensor:
    """The gradient, which the next step will make anew; zero for a tensor that took no part."""
    grad, view.grad = view.grad, None
    return torch.zeros_like(view) if grad is None else grad
