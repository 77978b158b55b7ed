"""One run whose weights and moments don't fit on one device: every process of a team keeps a part of each tensor (FSDP2).

A sublayer is gathered when it computes and put away afterwards; embedding, readout, norms and what the topology adds are gathered for
the whole forward and backward pass. Gradients are averaged into parts, and each process takes AdamW's step on its parts. A state
is that of a `Stack` of one run, so a checkpoint goes on in one process, in a team that shares batches, and in one that shares out
the run. Nowhere but in the first process, on its CPU, is a run ever whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError
from scalinglab.train.model import Block, Model
from scalinglab.train.scaling import build
from scalinglab.train.stack import BUFFERS, adamw_, rates_by_run, rates_by_tensor
from scalinglab.train.team import Team

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:
    raise ConfigError(f"fsdp needs torch 2.6 or newer, and this is {torch.__version__}: pip install -U torch") from None

_FIELDS = dict(zip(BUFFERS, ("param", "moment1", "moment2"), strict=True))


@dataclass
class _Part:
    """This process's part of a tensor, its moments, and what the parametrization does to it (tensors [1])."""

    name: str
    param: DTensor
    moment1: DTensor
    moment2: DTensor
    lr_p: Tensor
    decay_p: Tensor
    eps_p: Tensor


class Sharded:
    """One run in parts; for the training loop, a `Stack` of one.

    Parameters
    ----------
    configs : sequence of RunConfig
        One run.
    team : Team
        Two or more processes, each of which makes this object and calls the same methods in the same order.
    device : str or torch.device
        The CPU, or the GPU of this process.

    Attributes
    ----------
    model : callable
        Takes tokens [1, b, t], as a stacked model does; `nats(tokens, targets)` too.
    grads : list of Tensor [1, n]
        This process's part of each tensor's gradient.
    alive : Tensor of bool [1]
        False once a loss or a gradient was not finite: the run keeps the weights it had before that step.
    step : int
        Optimiser steps taken.
    size : int
        Parameters of the run, in all processes together.

    Raises
    ------
    ConfigError
        More runs than one, a single process, a device that can't share, or a torch that is too old.

    Notes
    -----
    The first process draws the weights on its CPU, so they are those of every other way to train the run, and hands them out
    tensor by tensor: it holds one whole copy for that time, the others never more than one whole tensor.

    Parts are cut along a tensor's first axis; a tensor with fewer rows than there are processes leaves some of them without.
    """

    def __init__(self, configs: Sequence[RunConfig], team: Team, *, device: str | torch.device = "cpu") -> None:
        self.configs, self._team, self._device = tuple(configs), team, torch.device(device)
        check_shardable(self.configs, team, self._device)
        (config,) = configs
        model = build(config, device="cpu" if team.leads else "meta")
        whole = [param.detach() for param in model.parameters()] if team.leads else []
        rates = rates_by_tensor(model, config)
        model.to("meta")
        self.size = sum(param.numel() for param in model.parameters())
        self._mesh = init_device_mesh(self._device.type, (team.size,))
        _share_out(model, config, self._mesh)
        model.to_empty(device=self._device)
        for param in model.parameters():  # before there are moments, so that the whole copy is no peak
            self._hand_out(cast(DTensor, param), whole.pop(0) if team.leads else None)
        self._parts = []
        for (name, param), rates_1 in zip(model.named_parameters(), rates.T, strict=True):
            rows = rates_1.to(self._device, param.dtype).split(1)
            moments = [torch.zeros_like(param, requires_grad=False) for _ in range(2)]
            self._parts.append(_Part(name, cast(DTensor, param), *moments, *rows))
        self.lr_k, self.decay_k, self.clip_k = rates_by_run(configs, like=self._parts[0].lr_p)
        self.model, self.grads = _OneReplica(model), [torch.zeros_like(_row(part.param)) for part in self._parts]
        self.alive = torch.ones(1, dtype=torch.bool, device=self._device)
        self.step = 0

    def backward(self, losses_k: Tensor) -> None:
        """This process's part of the gradient, averaged over the team, into `grads`; losses [1] are of its own sequences."""
        losses_k.sum().backward()
        self.grads = [_taken(part.param) for part in self._parts]

    def average(self, team: Team) -> None:
        """Nothing: the gradients are averaged where they are made."""

    def update(self, losses_k: Tensor, scale: float) -> Tensor:
        """One AdamW step from `grads`; returns the norm [1] of the whole gradient before clipping.

        Parameters
        ----------
        losses_k : Tensor [1]
            Loss of this step, the same in all processes; if it or the gradient is not finite, the run is frozen as it is.
        scale : float
            Share of the peak learning rate, in [0, 1]. Weight decay follows it.
        """
        with torch.no_grad():
            norms_k = self._norms()
            if not bool(torch.isfinite(losses_k) & torch.isfinite(norms_k)):
                self.alive.fill_(False)
                self._freeze()
            self.step += 1
            factor_k = (self.clip_k / (norms_k + 1e-6)).clamp_(max=1.0).where(self.alive, 0.0)
            optimizer = self.configs[0].optimizer
            for part, grad in zip(self._parts, self.grads, strict=True):
                adamw_(
                    _row(part.param), grad, _row(part.moment1), _row(part.moment2), step=self.step,
                    betas=(optimizer.beta1, optimizer.beta2), lr_p=part.lr_p, decay_p=part.decay_p, eps_p=part.eps_p,
                    lr_k=self.lr_k * scale, decay_k=self.decay_k, clip_k=factor_k,
                )  # fmt: skip
        return norms_k

    def weights(self, replica: int) -> dict[str, Tensor]:
        """State dict of the run on the CPU of the first process; it loads into the model that `scaling.build` makes.

        All processes must call this; in the others it is empty.
        """
        whole = list(self._whole("param"))
        return {part.name: tensor for part, tensor in zip(self._parts, whole, strict=False)}

    def state(self) -> dict[str, Tensor | int]:
        """What `Stack.state` of one run is, on the CPU of the first process.

        All processes must call this; in the others the tensors are empty.
        """
        state: dict[str, Tensor | int] = {"alive": self.alive.cpu(), "step": self.step}
        for name, field in _FIELDS.items():
            size = self.size if self._team.leads else 0
            flat_p, at = torch.empty(size, dtype=self._parts[0].param.dtype), 0
            for tensor in self._whole(field):
                flat_p[at : at + tensor.numel()] = tensor.flatten()
                at += tensor.numel()
            state[name] = flat_p.unsqueeze(0)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state` of the run; only the first process needs its params and moments."""
        for name, field in _FIELDS.items():
            at = 0
            for part in self._parts:
                tensor: DTensor = getattr(part, field)
                end = at + tensor.numel()
                self._hand_out(tensor, state[name][0, at:end].view(tensor.shape) if self._team.leads else None)
                at = end
        self.alive.copy_(state["alive"])
        self.step = int(state["step"])
        self._freeze()

    def _norms(self) -> Tensor:
        """Norm [1] of the whole gradient, the same in all processes; summed in double precision, so their number hardly shows."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in self.grads]
        squares = torch.stack(norms).square().sum().reshape(1)
        distributed.all_reduce(squares)
        return squares.sqrt_().to(self.lr_k.dtype)

    def _freeze(self) -> None:
        if not bool(self.alive):
            self.lr_k.zero_()
            for grad in self.grads:
                grad.zero_()

    @torch.no_grad()
    def _hand_out(self, part: DTensor, whole: Tensor | None) -> None:
        """Fill each process's part of a tensor that the first process has whole."""
        if whole is None:
            whole = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        spread = distribute_tensor(whole.to(self._device, part.dtype), self._mesh, [Shard(0)])
        part.to_local().copy_(spread.to_local())

    @torch.no_grad()
    def _whole(self, field: str) -> Iterator[Tensor]:
        """The tensors of a field put together, one after the other, on the CPU; the first process alone gets them."""
        for part in self._parts:
            whole = getattr(part, field).full_tensor()
            if self._team.leads:
                yield whole.detach().cpu()


class _OneReplica:
    """A plain model behind the axes of a stacked one: tokens [1, b, t]."""

    def __init__(self, solo: Model) -> None:
        self.solo = solo

    def __call__(self, tokens_1bt: Tensor) -> Tensor:
        logits_btv: Tensor = self.solo(tokens_1bt[0])
        return logits_btv.unsqueeze(0)

    def nats(self, tokens_1bt: Tensor, targets_1bt: Tensor) -> Tensor:
        return self.solo.nats(tokens_1bt[0], targets_1bt[0]).unsqueeze(0)


def check_shardable(configs: Sequence[RunConfig], team: Team, device: torch.device) -> None:
    """Raise ConfigError unless a team can share out these runs."""
    if len(configs) != 1:
        raise ConfigError(
            f"fsdp shares out one run at a time, and these are {len(configs)} ({', '.join(c.run_id for c in configs[:3])}): train them "
            "one by one, or without fsdp where they were begun as one stack"
        )
    if team.size == 1:
        raise ConfigError(
            "fsdp shares a run out over several processes, and there is one: start it with torchrun --nproc-per-node 2, or more"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"fsdp runs on cpu and cuda, not on device={str(device)!r}")


def _share_out(model: Model, config: RunConfig, mesh: DeviceMesh) -> None:
    """Make each sublayer, and all the rest together, a unit that is gathered when it computes.

    A block is no unit, since the loop over sublayers never calls it. Everything in a sublayer is the weight of a matrix product, which
    autocast would round to bfloat16 and keep, whole; rounded before it is gathered it is the same number and can be put away.
    """
    rounded = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = rounded if config.precision == "bf16" else MixedPrecisionPolicy()
    for block in cast(list[Block], model.blocks):
        for sublayer in (block.attention, block.ffn):
            fully_shard(sublayer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # put away after the forward pass too: evaluation has no backward pass that would, and an update would not reach what is gathered
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _row(part: DTensor) -> Tensor:
    """This process's numbers of a tensor as a view [1, n]."""
    return part.detach().to_local().flatten().unsqueeze(0)


def _taken(param: DTensor) -> Tensor:
    """This process's part of the gradient, which the next step will make anew; zero for a tensor that took no part."""
    grad, param.grad = param.grad, None
    return torch.zeros_like(_row(param)) if grad is None else _row(grad)
