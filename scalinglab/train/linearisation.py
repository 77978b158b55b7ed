"""Complete feature learning, tested: does a block's first update keep a non-linear part as depth grows?

One Adam step on one branch changes its output, at a fixed input, by F(W + D) - F(W) = J D + (rest). The ratio
|rest| / |J D| goes as the branch learning rate: as m_L^(alpha - 1) where branch multiplier and learning rate are m_L^-alpha
and m_L^(alpha - 1). Only alpha = 1 keeps it (CompleteP, arXiv:2505.01618, section 3); a learning rate lowered as 1/m_L
without a multiplier makes every block linear. Necessary for depth to be of use, not sufficient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from scalinglab.config import RunConfig
from scalinglab.coordinates import CoordinateCheck, Limit
from scalinglab.errors import ConfigError
from scalinglab.train import scaling
from scalinglab.train.coordcheck import Setting, check_config, probe_batch, probe_model
from scalinglab.train.model import Block

DEPTHS = (2, 4, 8, 16, 32)
LIMIT = Limit("ffn.nonlinearity", "updates", -0.10, 0.10, fail_below=-0.30, fail_above=0.30, fail_by="interval",
              why="complete feature learning; below -0.3 the blocks turn linear with depth")  # fmt: skip


def linearisation_test(
    architecture: str = "pre_ln",
    parametrization: str = "completep",
    *,
    depths: Sequence[int] = DEPTHS,
    seeds: Sequence[int] = (0, 1, 2, 3),
    lr: float = 1e-3,
    options: Mapping[str, Any] | None = None,
    perturb: Mapping[str, Mapping[str, float]] | None = None,
    setting: Setting | None = None,
    report: Callable[[str], None] | None = None,
) -> CoordinateCheck:
    """Depth exponent of the non-linear share of a block's first update, in float64 with an exact derivative.

    Of the block in the middle, attention and feed-forward are taken one at a time: each gets its own first Adam step (at the
    learning rate of its tensors) at the input that it has at init. The statistics are `attention.nonlinearity` and
    `ffn.nonlinearity`, |F(W + D) - F(W) - J D| / |J D|.

    Parameters
    ----------
    architecture, parametrization, options, perturb, seeds, lr, setting, report
        As in `coordinate_check`; the precision is always float64, for the rest is small.
    depths : sequence of int
        Numbers of blocks; the first is the base.

    Raises
    ------
    ConfigError
        A run that is none, or a branch that the loss doesn't reach.
    """
    setting = setting or Setting()
    setting = Setting(**{**asdict(setting), "precision": "fp64"})
    found: dict[tuple[str, int], NDArray[np.float64]] = {}
    for i, seed in enumerate(seeds):
        for j, depth in enumerate(depths):
            if report is not None:
                report(f"{architecture}, {parametrization}: depth {depth}, seed {seed}")
            config = check_config(
                "depth", depth, depths[0], setting, architecture=architecture, options=options, parametrization=parametrization,
                perturb=perturb, seed=seed, lr=lr,
            )  # fmt: skip
            for name, value in nonlinearity(config, embedding_std=setting.embedding_std).items():
                found.setdefault((f"{name}.nonlinearity", 1), np.full((len(seeds), len(depths)), np.nan))[i, j] = value
    return CoordinateCheck(
        architecture=architecture, parametrization=config.scaling().description, axis="depth", sizes=tuple(depths),
        seeds=tuple(seeds), lr=lr, trainable="branch", values=found, limits=(LIMIT,),
        setting=asdict(setting) | {"options": dict(options or {})},
    )  # fmt: skip


def nonlinearity(config: RunConfig, *, embedding_std: float = 1.0) -> dict[str, float]:
    """|F(W + D) - F(W) - J D| / |J D| of attention and feed-forward of the middle block, D their first Adam step.

    Raises
    ------
    ConfigError
        The gradient of a branch is zero.
    """
    model = probe_model(config, embedding_std)
    tokens, targets = probe_batch(config)
    block = model.blocks[model.owners[config.shape.depth // 2]]
    assert isinstance(block, Block)
    branches = {"attention": block.attention, "ffn": block.ffn}
    inputs: dict[str, tuple[Any, ...]] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: inputs.setdefault(name, args)  # type: ignore[return-value]

    hooks = [branch.register_forward_pre_hook(keep(name)) for name, branch in branches.items()]
    try:
        model.loss(tokens, targets).backward()
    finally:
        for hook in hooks:
            hook.remove()
    rates = {id(g.param): (g.lr, g.eps) for g in scaling.groups(model, config)}
    found = {}
    for name, branch in branches.items():
        step = {}
        for key, param in branch.named_parameters():
            lr, eps = rates[id(param)]
            gradient = param.grad if param.grad is not None else torch.zeros_like(param)
            step[key] = -lr * gradient / (gradient.abs() + eps)
        found[name] = _rest(branch, step, inputs[name], f"{name} of {config.architecture}")
    return found


def _rest(branch: nn.Module, step: Mapping[str, Tensor], args: tuple[Any, ...], name: str) -> float:
    """Non-linear over linear part of the change of a branch's output; args[0] is its input, the others don't vary."""
    at = {key: param.detach() for key, param in branch.named_parameters()}
    fixed = (args[0].detach(), *args[1:])

    def output(params: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(branch, params, fixed)
        return y

    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # fused kernels have no forward mode
        warnings.filterwarnings(
            "ignore", "`torch.jit.script", DeprecationWarning
        )  # torch's own, when jvp is first used
        before, linear = jvp(output, (at,), (dict(step),))
        after = output({key: value + step[key] for key, value in at.items()})
    size = float(linear.norm())
    if not size > 0:
        raise ConfigError(f"the first update of {name} changes nothing: its gradient is zero")
    return math.sqrt(float((after - before - linear).square().sum())) / size
