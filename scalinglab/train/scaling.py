"""Apply a parametrization to a model: forward multipliers, initial spread, and what the optimiser does to each tensor.

Rules come from `scalinglab.parametrization` (data), tags from `scalinglab.train.roles`. The only thing worked out here is
the ratio of each tensor's own fan-in to the one that it has in the base shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError
from scalinglab.parametrization import Group as Multipliers
from scalinglab.shapes import Shape
from scalinglab.train.model import Model, ModelConfig
from scalinglab.train.roles import Tag, tags

_INIT = 0x696E6974  # keeps the seeds of initial weights apart from those of data
_DTYPES = {"fp32": "float32", "fp64": "float64", "bf16": "float32"}  # parameters; bf16 is autocast


@dataclass(frozen=True)
class Group:
    """One tensor and its peak hyper-parameters in a run.

    Attributes
    ----------
    name : str
        Name in the model.
    param : nn.Parameter
    tag : Tag
    lr, eps : float
        Peak learning rate and Adam's epsilon.
    weight_decay : float
        As `torch.optim.AdamW` takes it: a step at the peak shrinks the weight by lr * weight_decay.
    """

    name: str
    param: nn.Parameter
    tag: Tag
    lr: float
    eps: float
    weight_decay: float


def build(config: RunConfig, *, device: str | torch.device = "cpu") -> Model:
    """The model of a run at step 0.

    Weights are drawn on the CPU from `config.seed`, so they are the same on every device.

    Raises
    ------
    ConfigError
        The parametrization has no rule for a tensor, or a multiplier that the model can't apply.
    """
    with torch.device("meta"):
        model = Model(_model_config(config))
    model.to_empty(device=device)
    draw(model, config)
    return model


@torch.no_grad()
def draw(model: Model, config: RunConfig) -> None:
    """Draw the initial weights of a run into its model, which must not be stacked."""
    model.init_weights(torch.Generator().manual_seed(init_seed(config.seed)))
    multipliers = tensor_multipliers(model, config)
    for name, param in model.named_parameters():
        if multipliers[name].init_std != 1:
            param.mul_(multipliers[name].init_std)


def groups(model: Model, config: RunConfig) -> list[Group]:
    """Every tensor of a model with its peak learning rate, epsilon and weight decay, in the order of its parameters.

    Raises
    ------
    ConfigError
        A parameter has no tag, or the parametrization no rule for it.
    """
    known, multipliers, optimizer = tags(model), tensor_multipliers(model, config), config.optimizer
    base_decay = optimizer.weight_decay / (config.lr if optimizer.decay == "independent" else 1.0)
    return [
        Group(
            name=name,
            param=param,
            tag=known[name],
            lr=config.lr * multipliers[name].lr,
            eps=optimizer.eps * multipliers[name].eps,
            weight_decay=base_decay * multipliers[name].weight_decay if known[name].decay else 0.0,
        )
        for name, param in model.named_parameters()
    ]


def optimizer(model: Model, config: RunConfig) -> torch.optim.AdamW:
    """The plain optimiser over these groups: the reference that the stacked one is tested against.

    The learning rates are peaks: a scheduler must multiply them, never set them.
    """
    settings = [
        {"params": [g.param], "name": g.name, "lr": g.lr, "eps": g.eps, "weight_decay": g.weight_decay}
        for g in groups(model, config)
    ]
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    return torch.optim.AdamW(settings, lr=config.lr, betas=betas, foreach=False)


def init_seed(seed: int) -> int:
    """Seed of the generator that draws the initial weights of a run."""
    return int(np.random.SeedSequence([_INIT, seed]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def tensor_multipliers(model: Model, config: RunConfig) -> dict[str, Multipliers]:
    """Multipliers of every tensor by name, from its tags and its fan-in here and in the base shape."""
    scaling, shape, base = config.scaling(), config.shape.build(), _base_shape(config)
    # The base model has the same depth, hence the same names; fan-in does not depend on depth.
    with torch.device("meta"):
        at_base = tags(Model(replace(_model_config(config), shape=replace(base, depth=shape.depth))))
    found = {}
    for name, tag in tags(model).items():
        multipliers = scaling.resolve(
            tag.role,
            tag.location,
            width_ratio=shape.width / base.width,
            depth_ratio=shape.depth / base.depth,
            fan_in_ratio=tag.fan_in / at_base[name].fan_in if tag.role in ("matrix", "readout") else None,
        )
        if tag.role not in ("input", "readout") and multipliers.forward != 1:
            raise ConfigError(
                f"parametrization {scaling.description!r} has a forward multiplier {multipliers.forward:g} for "
                f"{tag.role}.{tag.location} ({name}); only input.outside and readout.outside have one"
            )
        found[name] = multipliers
    return found


def _model_config(config: RunConfig) -> ModelConfig:
    shape = config.shape.build()
    scales = config.scaling().scales(shape, _base_shape(config))
    return ModelConfig(
        shape,
        architecture=config.architecture,
        options=config.options,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        positions=config.positions,
        init=scales.init,
        init_std=config.init_std,
        branch_multiplier=scales.branch_multiplier,
        readout_multiplier=scales.readout_multiplier,
        embedding_multiplier=scales.embedding_multiplier,
        attention_scale=scales.attention_scale,
        dtype=_DTYPES[config.precision],  # type: ignore[arg-type]
    )


def _base_shape(config: RunConfig) -> Shape:
    """The base of a run; its own shape where nothing scales."""
    shape, base = config.shape.build(), config.base
    if base is None:
        return shape
    if base.width % base.head_dim:
        raise ConfigError(f"base.width={base.width} must be a multiple of base.head_dim={base.head_dim}")
    return replace(
        shape,
        depth=base.depth,
        width=base.width,
        ffn_dim=base.ffn_dim,
        head_dim=base.head_dim,
        heads=base.width // base.head_dim,
        kv_heads=base.width // base.head_dim,
    )
