"""Coordinate checks: train tiny networks of growing width or depth for a few steps and see what each update changes.

Constant learning rate, no warmup, no clipping, no decay, one batch that is both trained on and measured, the same data at
every size. Initial sizes can look right while updates explode, so what is judged is the change since step 0.

>>> check = coordinate_check("pre_ln", "completep", axis="depth", sizes=(2, 4), seeds=(0, 1), steps=1)
>>> check.table.columns[:3].tolist()
['statistic', 'step', 'slope']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalinglab.config import Base, Optimizer, RunConfig, Schedule, ShapeSpec, Sweep
from scalinglab.coordinates import Axis, CoordinateCheck, Trainable, limits_for
from scalinglab.errors import ConfigError
from scalinglab.planning import expand
from scalinglab.shapes import FFN
from scalinglab.train import scaling
from scalinglab.train.corpora import Markov, training_stream
from scalinglab.train.layers import Attention, rotate
from scalinglab.train.model import Model
from scalinglab.train.roles import tag_of

SIZES: Mapping[str, tuple[int, ...]] = {"width": (64, 128, 256, 512), "depth": (2, 4, 8, 16, 32)}
# Where the branches add independently to the embedding, what they add at init goes as depth^(1/2 - alpha).
_PLAIN_SUMS = (
    "pre_ln",
    "sandwich",
    "layerscale",
    "denseformer",
    "hyper_connections",
    "hyper_connections_static",
    "moda",
)

Statistics = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Setting:
    """The networks and the data of a check, small on purpose.

    Attributes
    ----------
    width, depth : int
        The one that isn't varied.
    head_dim : int
        Fixed; wider networks have more heads.
    ffn_ratio : int
        ffn_dim / width, fixed.
    ffn : {"swiglu", "gelu"}
    vocab, context, batch : int
        Alphabet of a first-order Markov chain (and what begins a sequence), tokens per sequence, sequences. A larger alphabet
        hides the aligned part of the change of logits behind its random part, which falls as 1/sqrt(width).
    init_std : float, optional
        Of matrices and readout at the base shape; by default 1 / sqrt(width) of the base, so that branches carry signal.
    embedding_std : float
        Of the embedding. One, so that the stream starts as large as a branch's output: the exponents are those of large
        networks then, not of how a small embedding is overtaken.
    eps, norm_eps : float
        Of Adam and of the norms; small enough to be inert.
    """

    width: int = 64
    depth: int = 2
    head_dim: int = 16
    ffn_ratio: int = 3
    ffn: FFN = "swiglu"
    vocab: int = 32
    context: int = 32
    batch: int = 8
    init_std: float | None = None
    embedding_std: float = 1.0
    eps: float = 1e-15
    norm_eps: float = 1e-8
    precision: Literal["fp32", "fp64"] = "fp32"


def coordinate_check(
    architecture: str = "pre_ln",
    parametrization: str = "completep",
    *,
    axis: Axis = "depth",
    sizes: Sequence[int] | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3),
    steps: int = 4,
    lr: float = 1e-3,
    trainable: Trainable | None = None,
    options: Mapping[str, Any] | None = None,
    perturb: Mapping[str, Mapping[str, float]] | None = None,
    setting: Setting | None = None,
    report: Callable[[str], None] | None = None,
) -> CoordinateCheck:
    """Exponents of activations and of their changes in width or depth, judged by `coordinates.limits_for`.

    Parameters
    ----------
    architecture, parametrization, options, perturb
        As in `RunConfig`; "native" takes the rule of the architecture.
    axis : {"width", "depth"}
    sizes : sequence of int, optional
        Widths or numbers of blocks, the first is the base; `SIZES` unless given.
    seeds : sequence of int
        Of weights and data; one gives no interval, hence no verdict, three or more a usable one.
    steps : int
        Updates, measured after each.
    lr : float
        Base learning rate: so high that updates are seen, so low that the final norm doesn't saturate.
    trainable : {"branch", "trunk", "all"}, optional
        Which tensors move, by location; "branch" for depth (the embedding's change would hide a wrong exponent), else "all".
    setting : Setting, optional
    report : callable, optional
        Told in words which network comes next.

    Returns
    -------
    CoordinateCheck
        Statistics are root mean squares over batch, position and channel: `h` (stream before the final norm), `z` (after it),
        `logits`, `attention.*` and `ffn.*` (branch outputs as written, of the first, middle and last block), `scores.*`
        (attention logits), each with `.change` since step 0; `branches` (what all branches add to the embedding, step 0);
        `weights.*` (change of a tensor relative to its initial norm, over all blocks).

    Raises
    ------
    ConfigError
        A size that the shapes don't allow, no step, or no tensor of the kind that should move.
    """
    setting = setting or Setting()
    sizes = tuple(SIZES.get(axis, ()) if sizes is None else sizes)
    trainable = trainable or ("branch" if axis == "depth" else "all")
    if axis not in SIZES or len(sizes) < 2 or not seeds or steps < 1:
        raise ConfigError(
            f"a coordinate check needs axis='width' or 'depth', two sizes, a seed and a step, not axis={axis!r}, "
            f"sizes={list(sizes)}, seeds={list(seeds)}, steps={steps}"
        )

    def run_config(size: int, seed: int) -> RunConfig:
        return check_config(axis, size, sizes[0], setting, architecture=architecture, parametrization=parametrization,
                            options=options, perturb=perturb, seed=seed, lr=lr)  # fmt: skip

    found: dict[tuple[str, int], NDArray[np.float64]] = {}
    share, config = 0.0, run_config(sizes[0], seeds[0])
    for i, seed in enumerate(seeds):
        for j, size in enumerate(sizes):
            if report is not None:
                report(f"{architecture}, {parametrization}: {axis} {size}, seed {seed}")
            statistics, small = _trajectory(run_config(size, seed), trainable, steps, setting.embedding_std)
            share = max(share, small)
            for key, value in statistics.items():
                found.setdefault(key, np.full((len(seeds), len(sizes)), np.nan))[i, j] = value
    return CoordinateCheck(
        architecture=architecture,
        parametrization=config.scaling().description,
        axis=axis,
        sizes=sizes,
        seeds=tuple(seeds),
        lr=lr,
        trainable=trainable,
        values=dict(sorted(found.items(), key=lambda item: _order(*item[0]))),
        limits=limits_for(axis, trainable, contribution=_contribution(architecture, config)),
        base_identical=same_at_base(config, trainable, embedding_std=setting.embedding_std),
        eps_share=share,
        setting=asdict(setting) | {"steps": steps, "options": dict(options or {})},
    )


def coords(
    sweep: Sweep,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 2,
    lr: float = 1e-3,
    setting: Setting | None = None,
    sizes: Mapping[str, Sequence[int]] = SIZES,
    report: Callable[[str], None] | None = None,
    done: Callable[[CoordinateCheck], None] | None = None,
) -> list[CoordinateCheck]:
    """The checks that belong to a sweep: every architecture with every parametrization, on tiny networks.

    An axis along which no shape of an arm differs from its base (or, without one, from its first shape) is not checked.
    Architectures with tensors that act on the stream itself are checked over depth once more with only these moving.

    Parameters
    ----------
    sweep : Sweep
    seeds, steps, lr, setting, report
        As in `coordinate_check`; about ten seconds of one core per check. The learning rate is the probe's, not the sweep's.
    sizes : mapping
        "width" and "depth" -> sizes of the networks, the first is the base; `SIZES` where one is missing.
    done : callable, optional
        Given each check as soon as it is made.

    Raises
    ------
    ConfigError
        As `planning.expand` and `coordinate_check`.
    """
    arms: dict[str, RunConfig] = {}
    axes: dict[str, set[Axis]] = {}
    for run in expand(sweep).runs:
        key = repr((run.architecture, run.options, run.parametrization, run.perturb))
        arms.setdefault(key, run)
        base = run.base
        for axis, own in (("width", run.shape.width), ("depth", run.shape.depth)):
            first = getattr(base, axis) if base is not None else getattr(arms[key].shape, axis)
            if own != first:
                axes.setdefault(key, set()).add(axis)  # type: ignore[arg-type]
    checks: list[CoordinateCheck] = []
    for key, run in arms.items():
        for axis in sorted(axes.get(key, ())):
            moving: list[Trainable | None] = [None]
            if axis == "depth" and _acts_on_trunk(run, setting or Setting()):
                moving.append("trunk")
            for trainable in moving:
                check = coordinate_check(
                    run.architecture, run.parametrization, axis=axis, sizes=sizes.get(axis, SIZES[axis]), seeds=seeds,
                    steps=steps, lr=lr, trainable=trainable, options=run.options, perturb=run.perturb, setting=setting,
                    report=report,
                )  # fmt: skip
                checks.append(check)
                if done is not None:
                    done(check)
    return checks


def _acts_on_trunk(run: RunConfig, setting: Setting) -> bool:
    config = check_config("depth", 2, 2, setting, architecture=run.architecture, parametrization=run.parametrization,
                          options=run.options, perturb=run.perturb, seed=0, lr=run.lr)  # fmt: skip
    return any(tag_of(p).location == "trunk" for p in scaling.build(config).parameters())


def same_at_base(config: RunConfig, trainable: Trainable = "all", *, embedding_std: float = 1.0) -> bool | None:
    """Whether a run at its base shape starts and takes its first update bit for bit as the standard parametrization does.

    A constant factor that the run sets on an entry is given to the standard parametrization too: it tunes, it doesn't scale.
    None for sp and sp_gpt2 without changes.
    """
    plain = config.parametrization if config.parametrization in ("sp", "sp_gpt2") else "sp"
    tuned = {entry: {"factor": new["factor"]} for entry, new in config.perturb.items() if "factor" in new}
    other = msgspec.structs.replace(config, parametrization=plain, perturb=tuned)
    if other == config:
        return None
    first, second = (_trajectory(c, trainable, 1, embedding_std)[0] for c in (config, other))
    return first == second


# ---- one network -------------------------------------------------------------------------------------------------------
def check_config(
    axis: Axis, size: int, base: int, setting: Setting, *, architecture: str, parametrization: str,
    options: Mapping[str, Any] | None, perturb: Mapping[str, Mapping[str, float]] | None, seed: int, lr: float,
) -> RunConfig:  # fmt: skip
    """The run of one network of a check: `size` along `axis`, with `base` as base size.

    Raises
    ------
    ConfigError
        A width that is no multiple of the head size, or what `RunConfig` refuses.
    """
    width, depth = (size, setting.depth) if axis == "width" else (setting.width, size)
    base_width, base_depth = (base, setting.depth) if axis == "width" else (setting.width, base)
    if width % setting.head_dim:
        raise ConfigError(f"width={width} of a coordinate check must be a multiple of head_dim={setting.head_dim}")
    return RunConfig(
        shape=ShapeSpec(
            depth=depth, width=width, ffn_dim=setting.ffn_ratio * width, heads=width // setting.head_dim,
            head_dim=setting.head_dim, vocab=setting.vocab, context=setting.context, ffn=setting.ffn,
        ),
        base=Base(depth=base_depth, width=base_width, head_dim=setting.head_dim, ffn_dim=setting.ffn_ratio * base_width),
        lr=lr, tokens=setting.batch * setting.context, batch=setting.batch, seed=seed,
        corpus="markov", corpus_options={"alphabet": setting.vocab - 1, "order": 1},
        architecture=architecture, options=dict(options or {}), parametrization=parametrization,
        perturb={entry: dict(change) for entry, change in (perturb or {}).items()},
        init_std=setting.init_std or base_width**-0.5, norm_eps=setting.norm_eps, precision=setting.precision,
        optimizer=Optimizer(eps=setting.eps, weight_decay=0.0, grad_clip=math.inf),
        schedule=Schedule(kind="constant", warmup=0.0),
    )  # fmt: skip


def probe_model(config: RunConfig, embedding_std: float) -> Model:
    """The model of a run with an embedding of another standard deviation."""
    model = scaling.build(config)
    with torch.no_grad():
        model.embedding_vd.mul_(embedding_std / config.init_std)
    return model


def probe_batch(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Tokens and targets [b, t] of a check; they depend on the seed and the setting, not on the network."""
    corpus = Markov(**config.corpus_options, context=config.shape.context)
    tokens, targets = corpus.batch(training_stream(config.seed), config.batch, config.shape.context)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _trajectory(config: RunConfig, trainable: Trainable, steps: int, embedding_std: float) -> tuple[Statistics, float]:
    """Statistics at steps 0 .. `steps`, and the share of Adam entries that epsilon holds back."""
    model = probe_model(config, embedding_std)
    tokens, targets = probe_batch(config)
    moving = {name: p for name, p in model.named_parameters() if trainable in ("all", tag_of(p, name).location)}
    if not moving:
        raise ConfigError(
            f"architecture {config.architecture!r} has no {trainable} tensors: choose another `trainable`"
        )
    for param in model.parameters():
        param.requires_grad_(False)
    for param in moving.values():
        param.requires_grad_(True)
    optimizer = scaling.optimizer(model, config)
    start = {name: p.detach().clone() for name, p in moving.items()}
    first = _measure(model, tokens)
    found: Statistics = {(name, 0): _rms(x) for name, x in first.items()}
    found["branches", 0] = _rms(first["h"] - model.hidden(tokens, skip=range(2 * config.shape.depth)).detach())
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
        for name, x in _measure(model, tokens).items():
            found[name, step] = _rms(x)
            found[f"{name}.change", step] = _rms(x - first[name])
        found |= {(f"weights.{kind}", step): value for kind, value in _movement(moving, start).items()}
    return found, _held_by_eps(optimizer)


@torch.no_grad()
def _measure(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """What the statistics are taken of: stream, normalised stream, logits, branch outputs and attention logits."""
    last = model.config.shape.depth - 1
    places = {0: "first", last // 2 + last % 2: "middle", last: "last"} if last else {0: "first"}
    found: dict[str, Tensor] = {}
    inputs: list[Tensor] = []

    def observe(i: int, stream: Any, x: Tensor, y: Tensor) -> None:
        if i // 2 in places:
            found[f"{('attention', 'ffn')[i % 2]}.{places[i // 2]}"] = y

    hooks = [
        module.register_forward_pre_hook(lambda module, args: inputs.append(_scores(module, *args[:2])))
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    try:
        h = model.hidden(tokens, observe=observe)
    finally:
        for hook in hooks:
            hook.remove()
    found |= {f"scores.{place}": inputs[block] for block, place in places.items()}
    return {"h": h, "z": model.final_norm(h), "logits": model.logits(h), **found}


def _scores(attention: Attention, x_btd: Tensor, positions: Any) -> Tensor:
    """Attention logits [b, h, t, t] on and under the diagonal, zero above."""
    q_bhtc = rotate(attention.heads(x_btd, attention.query_hd), positions)
    k_bktc = rotate(attention.heads(x_btd, attention.key_kd), positions)
    k_bhtc = k_bktc.repeat_interleave(attention.group, dim=-3)
    return (q_bhtc @ k_bhtc.transpose(-2, -1) * attention.scale).tril()


def _movement(params: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative change of all tensors of one name over the blocks; tensors that start at zero are left out."""
    moved: dict[str, list[float]] = {}
    for name, param in params.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit()).removeprefix("blocks.")
        sums = moved.setdefault(kind, [0.0, 0.0])
        sums[0] += float((param.detach() - start[name]).double().square().sum())
        sums[1] += float(start[name].double().square().sum())
    return {kind: math.sqrt(change / norm) for kind, (change, norm) in moved.items() if norm > 0}


def _held_by_eps(optimizer: torch.optim.AdamW) -> float:
    """Share of entries with 0 < sqrt(v) < 10 eps, v corrected for bias."""
    small, total = 0, 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in optimizer.state:
                continue
            state = optimizer.state[param]
            root = (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))).sqrt()
            small += int(((root > 0) & (root < 10 * group["eps"])).sum())
            total += root.numel()
    return small / total if total else 0.0


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _contribution(architecture: str, config: RunConfig) -> float | None:
    alpha = config.scaling().alpha
    return None if alpha is None or architecture not in _PLAIN_SUMS else 0.5 - alpha


def _order(statistic: str, step: int) -> tuple[int, str, int]:
    """Rows in the order in which a reader wants them: changes of the stream first, weights last, each by step."""
    kinds = ("branches", "h", "z", "logits", "attention", "ffn", "scores", "weights")
    return kinds.index(statistic.split(".")[0]), statistic, step
