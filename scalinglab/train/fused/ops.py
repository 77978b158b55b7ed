"""The kernels as differentiable functions of stacked tensors, with the semantics of `scalinglab.train.layers`.

Axes in names: k replica, b sequence, t position, d width, h query channels and g key channels (heads * head_dim),
f feed-forward width, v vocabulary, p all parameters.
Activations are [k, b, t, ...]; a weight is [k, out, in] with any stride between replicas and contiguous inside.

Gradients of weights: a leaf whose `.grad` is there already, contiguous inside like the leaf, has them added in place
during the backward pass, and autograd sees none: hooks on the leaf don't run and `torch.autograd.grad` finds nothing.
All other weights get theirs from autograd as usual.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scalinglab.errors import ConfigError
from scalinglab.shapes import Shape
from scalinglab.train.fused.shelves import FIRST_ONLY, Shelf
from scalinglab.train.layers import Rotary

_INTEGER, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {  # integers, floats, and then pointers (p) and weights (w: pointer, replica stride) in order
    "attention_forward": (10, 1, "pwwwwppppppp"),
    "attention_backward": (10, 1, "ppwwwwppppppppwwww"),
    "put_forward": (5, 0, "pp"),
    "put_backward": (5, 0, "pp"),
    "read_forward": (6, 1, "ppppp"),
    "read_backward": (6, 1, "ppppppp"),
    "feed_forward_forward": (4, 0, "pwwwpp"),
    "feed_forward_backward": (4, 0, "pppwwwpwww"),
    "norm_forward": (3, 1, "pwpp"),
    "norm_backward": (3, 0, "ppwppw"),
    "head_forward": (4, 1, "pwpppp"),
    "head_backward": (4, 1, "ppwppppw"),
    "mix_forward": (5, 0, "ppp"),
    "mix_backward": (5, 0, "ppppp"),
    "sinkhorn_forward": (3, 0, "pp"),
    "sinkhorn_backward": (3, 0, "ppp"),
    "adamw": (2, 4, "pppppppppp"),
}


@dataclass(frozen=True)
class Kernels:
    """The native sublayers; `scalinglab.train.fused.load` makes one.

    One thread, float32, deterministic to the bit. A replica's result does not depend on the others, NaN included.
    """

    library: ctypes.CDLL

    def __post_init__(self) -> None:
        for name, (integers, floats, rest) in _SIGNATURES.items():
            call = getattr(self.library, f"scalinglab_{name}")
            call.argtypes = [_INTEGER] * integers + [_FLOAT] * floats
            for kind in rest:
                call.argtypes += [_POINTER, _INTEGER] if kind == "w" else [_POINTER]
            call.restype = _INTEGER if name == "head_forward" else None

    def refuses(self, shape: Shape, *, dtype: torch.dtype, device: str | torch.device = "cpu") -> str | None:
        """Why a model can't run on these kernels, or None: they take float32 on the CPU, and every `Shape`."""
        if torch.device(device).type != "cpu":
            return f"the native kernels run on the CPU, not on {device}"
        if dtype != torch.float32:
            return f"the native kernels compute in float32, not in {str(dtype).removeprefix('torch.')}"
        return None

    def norm(self, x_kbtd: Tensor, gain_kd: Tensor, eps: float) -> Tensor:
        """gain * x / sqrt(mean(x²) + eps) over the last axis.

        Raises
        ------
        ConfigError
            As all of these: a tensor isn't float32 on the CPU, or its axes don't fit.
        """
        _check(x_kbtd, ("gain", gain_kd, x_kbtd.shape[-1:]))
        y: Tensor = _Norm.apply(self.library, x_kbtd, gain_kd, eps)
        return y

    def attention(
        self,
        x_kbtd: Tensor,
        query_khd: Tensor,
        key_kgd: Tensor,
        value_kgd: Tensor,
        output_kdh: Tensor,
        *,
        head_dim: int,
        scale: float,
        positions: Rotary,
        depth: Shelf | None = None,
        keeps: bool = False,
    ) -> Tensor:
        """Causal self-attention with its four projections.

        Parameters
        ----------
        x_kbtd : Tensor
        query_khd, key_kgd, value_kgd, output_kdh : Tensor
            [k, heads * head_dim, d], twice [k, kv_heads * head_dim, d], [k, d, heads * head_dim]. Consecutive groups of
            query heads share a key/value head.
        head_dim : int
        scale : float
            Factor on the attention logits.
        positions : (cos, sin) or None
            Tables [t, head_dim / 2] of rotary positions (rotate-half), without gradient.
        depth : Shelf, optional
            Slots [key | value], 2 * kv_heads * head_dim channels, of the same token, that come under the same softmax; their
            keys are not rotated.
        keeps : bool
            Put this sublayer's own key, before rotation, and value into the next slot.

        Returns
        -------
        Tensor
            [k, b, t, d].
        """
        d, wide, narrow = x_kbtd.shape[-1], query_khd.shape[-2], key_kgd.shape[-2]
        if wide % head_dim or narrow % head_dim or wide % narrow:
            raise ConfigError(f"{wide} query and {narrow} key channels aren't whole groups of heads of {head_dim}")
        _check(
            x_kbtd,
            ("query", query_khd, (wide, d)),
            ("key", key_kgd, (narrow, d)),
            ("value", value_kgd, (narrow, d)),
            ("output", output_kdh, (d, wide)),
        )
        tables = []
        for table in positions or ():
            if table.shape != (x_kbtd.shape[-2], head_dim // 2) or head_dim % 2 or not table.is_cpu:
                raise ConfigError(
                    f"a table of rotary positions is {tuple(table.shape)} on {table.device}; "
                    f"{x_kbtd.shape[-2]} positions and head_dim={head_dim} need [positions, head_dim / 2] on the CPU"
                )
            tables.append(table.detach().to(torch.float32).contiguous())
        weights = (query_khd, key_kgd, value_kgd, output_kdh)
        y: Tensor
        if depth is None:
            y, _ = _Attention.apply(self.library, x_kbtd, *weights, head_dim, scale, tables, None, (0, 0, 0), None)
            return y
        if depth.lead != x_kbtd.shape[:3] or depth.width != 2 * narrow:
            raise ConfigError(
                f"a shelf of {depth.lead} and {depth.width} channels doesn't fit activations {tuple(x_kbtd.shape)} with "
                f"{narrow} key channels"
            )
        slots = (depth.capacity, depth.count, int(keeps))
        if keeps:
            depth.next()
        y, token = _Attention.apply(self.library, x_kbtd, *weights, head_dim, scale, tables, depth, slots, depth.token)
        if keeps:
            depth.token = token
        return y

    def shelf(self, like_kbtd: Tensor, capacity: int, width: int) -> Shelf:
        """Slots for what later sublayers read of earlier ones; see `scalinglab.train.fused.shelves`."""
        return Shelf(self.library, like_kbtd, capacity, width)

    def feed_forward(self, x_kbtd: Tensor, gate_kfd: Tensor | None, up_kfd: Tensor, down_kdf: Tensor) -> Tensor:
        """down(silu(gate x) * up x), or down(gelu(up x)) with the exact GELU where there is no gate."""
        d, f = x_kbtd.shape[-1], up_kfd.shape[-2]
        gate = () if gate_kfd is None else (("gate", gate_kfd, (f, d)),)
        _check(x_kbtd, ("up", up_kfd, (f, d)), ("down", down_kdf, (d, f)), *gate)
        y: Tensor = _FeedForward.apply(self.library, x_kbtd, gate_kfd, up_kfd, down_kdf)
        return y

    def head_loss(self, h_kbtd: Tensor, head_kvd: Tensor, targets_kbt: Tensor, multiplier: float = 1.0) -> Tensor:
        """Cross-entropy [k, b, t] in nats per token of the logits multiplier * (h W^T), which are not kept.

        Raises
        ------
        ConfigError
            A target is outside the vocabulary.
        """
        _check(h_kbtd, ("head", head_kvd, (head_kvd.shape[-2], h_kbtd.shape[-1])))
        if targets_kbt.shape != h_kbtd.shape[:-1] or targets_kbt.dtype != torch.int64:
            raise ConfigError(
                f"targets {tuple(targets_kbt.shape)} of {targets_kbt.dtype} must be int64 {tuple(h_kbtd.shape[:-1])}"
            )
        differentiable = torch.is_grad_enabled() and (h_kbtd.requires_grad or head_kvd.requires_grad)
        y: Tensor = _Head.apply(self.library, h_kbtd, head_kvd, targets_kbt.contiguous(), multiplier, differentiable)
        return y

    def mix(self, weights: Tensor, sources_kbtsd: Tensor) -> Tensor:
        """Weighted sums [k, b, t, m, d] over the sources of each token.

        Parameters
        ----------
        weights : Tensor
            [k, b, t, m, s], or [k, 1, 1, m, s] where all tokens of a replica share them.
        sources_kbtsd : Tensor
        """
        lead, count = sources_kbtsd.shape[:3], weights.shape[-1]
        if weights.dim() != 5 or weights.shape[:3] not in (lead, (lead[0], 1, 1)) or count != sources_kbtsd.shape[-2]:
            raise ConfigError(f"weights {tuple(weights.shape)} don't fit sources {tuple(sources_kbtsd.shape)}")
        for name, x in (("weights", weights), ("sources", sources_kbtsd)):
            if x.dtype != torch.float32 or not x.is_cpu:
                raise ConfigError(f"{name} is {x.dtype} on {x.device}; the native kernels take float32 on the CPU")
        y: Tensor = _Mix.apply(self.library, weights, sources_kbtsd)
        return y

    def sinkhorn(self, logits: Tensor, iterations: int) -> Tensor:
        """exp(logits [.., n, n]) with columns, then rows divided by their sums, `iterations` times."""
        if logits.shape[-1] != logits.shape[-2] or logits.dtype != torch.float32 or not logits.is_cpu:
            raise ConfigError(f"logits {tuple(logits.shape)} of {logits.dtype} must be square, float32 and on the CPU")
        y: Tensor = _Sinkhorn.apply(self.library, logits, iterations)
        return y

    def adamw_(
        self,
        param_kp: Tensor,
        grad_kp: Tensor,
        mean_kp: Tensor,
        square_kp: Tensor,
        *,
        step: int,
        betas: tuple[float, float],
        lr_p: Tensor,
        weight_decay_p: Tensor,
        eps_p: Tensor,
        lr_k: Tensor,
        weight_decay_k: Tensor,
        clip_k: Tensor,
    ) -> None:
        """One step of AdamW in place, as `torch.optim.AdamW` takes it, over whole flat buffers.

        Parameters
        ----------
        param_kp, grad_kp, mean_kp, square_kp : Tensor
            Parameters, gradients (left as they are) and running moments, contiguous [k, p].
        step : int
            1 for the first step.
        betas : tuple of float
        lr_p, weight_decay_p : Tensor
            [p] factors on the columns below; 1 and 0 or 1 where parameters don't differ.
        eps_p : Tensor
            [p].
        lr_k, weight_decay_k, clip_k : Tensor
            [k]: learning rate and decay of this step, and the factor on the gradient that clipping asks for.

        Raises
        ------
        ConfigError
            A tensor isn't contiguous float32 on the CPU or has other axes, or the step is below 1.
        """
        replicas, params = param_kp.shape
        moments, rows = (param_kp, grad_kp, mean_kp, square_kp), (lr_p, weight_decay_p, eps_p)
        columns = (lr_k, weight_decay_k, clip_k)
        for tensors, shape in ((moments, (replicas, params)), (rows, (params,)), (columns, (replicas,))):
            for x in tensors:
                if x.shape != shape or x.dtype != torch.float32 or not x.is_cpu or not x.is_contiguous():
                    raise ConfigError(
                        f"a tensor {tuple(x.shape)} of {x.dtype} on {x.device} for AdamW must be float32 {shape} "
                        "on the CPU and contiguous"
                    )
        if step < 1:
            raise ConfigError(f"step={step} of AdamW must be 1 or more")
        corrections = (1 - beta**step for beta in betas)
        everything = (*moments, *rows, *columns)
        self.library.scalinglab_adamw(replicas, params, *betas, *corrections, *(x.data_ptr() for x in everything))


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        x, gain = x.contiguous(), _inside(gain)
        ctx.library, ctx.sizes = library, _rows(x)
        y, inverse = torch.empty_like(x), _buffer(*ctx.sizes[:2])
        library.scalinglab_norm_forward(*ctx.sizes, eps, _at(x), *_weight(gain), _at(y), _at(inverse))
        ctx.save_for_backward(x, gain, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gain, inverse = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        into, returned = _gradients(ctx, 2, (gain,))
        ctx.library.scalinglab_norm_backward(*ctx.sizes, _at(dy), _at(x), *_weight(gain), _at(inverse), _at(dx), *into)
        return None, dx, *returned, None


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        head_dim: int,
        scale: float,
        tables: list[Tensor],
        shelf: Shelf | None,
        slots: tuple[int, int, int],
        token: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        weights = tuple(_inside(weight) for weight in (query, key, value, output))
        replicas, sequences, length, width = x.shape
        wide, narrow = query.shape[-2], key.shape[-2]
        heads = wide // head_dim
        ctx.library, ctx.scale, ctx.tables, ctx.buffers = (
            library,
            scale,
            tables,
            None if shelf is None else shelf.buffers,
        )
        ctx.sizes = (replicas, sequences, length, width, heads, narrow // head_dim, head_dim, *slots)
        y = torch.empty_like(x)
        qkv = _buffer(replicas, sequences, length, wide + 2 * narrow)
        mixed = _buffer(replicas, sequences, length, wide)
        softmax = _buffer(replicas, sequences, heads, length, 2)
        library.scalinglab_attention_forward(
            *ctx.sizes, scale, _at(x), *_weights(weights), *_tables(tables), _at(None if shelf is None else shelf.buffers.data),
            _at(y), _at(qkv), _at(mixed), _at(softmax),
        )  # fmt: skip
        ctx.save_for_backward(x, *weights, qkv, mixed, softmax)
        return y, torch.empty(0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtoken: Tensor) -> tuple[Any, ...]:
        x, *weights, qkv, mixed, softmax = ctx.saved_tensors
        buffers = (None, None) if ctx.buffers is None else (ctx.buffers.data, ctx.buffers.grads)
        dy, dx = dy.contiguous(), torch.empty_like(x)
        into, returned = _gradients(ctx, 2, weights)
        ctx.library.scalinglab_attention_backward(
            *ctx.sizes, ctx.scale, _at(dy), _at(x), *_weights(weights), *_tables(ctx.tables), *map(_at, buffers), _at(qkv),
            _at(mixed), _at(softmax), _at(dx), *into,
        )  # fmt: skip
        return None, dx, *returned, None, None, None, None, None, None if ctx.buffers is None else torch.empty(0)


class _FeedForward(Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
        x = x.contiguous()
        gate, up, down = None if gate is None else _inside(gate), _inside(up), _inside(down)
        ctx.library, ctx.sizes = library, (*_rows(x), up.shape[-2])
        y, pre = torch.empty_like(x), _buffer(*ctx.sizes[:2], up.shape[-2] * (1 if gate is None else 2))
        library.scalinglab_feed_forward_forward(*ctx.sizes, _at(x), *_weights((gate, up, down)), _at(y), _at(pre))
        ctx.save_for_backward(x, pre, gate, up, down)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, pre, *weights = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        into, returned = _gradients(ctx, 2, weights)
        ctx.library.scalinglab_feed_forward_backward(
            *ctx.sizes, _at(dy), _at(x), _at(pre), *_weights(weights), _at(dx), *into
        )
        return None, dx, *returned


class _Head(Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        h: Tensor,
        head: Tensor,
        targets: Tensor,
        multiplier: float,
        differentiable: bool,
    ) -> Tensor:
        h, head = h.contiguous(), _inside(head)
        vocab = head.shape[-2]
        ctx.library, ctx.sizes, ctx.multiplier = library, (*_rows(h), vocab), multiplier
        loss = _buffer(*h.shape[:-1])
        weights = total = None
        if differentiable:  # forward itself runs without gradients and can't tell
            weights, total = _buffer(*ctx.sizes[:2], -(-vocab // 8) * 8), torch.empty_like(loss)
        wrong = library.scalinglab_head_forward(
            *ctx.sizes, multiplier, _at(h), *_weight(head), _at(targets), _at(loss), _at(weights), _at(total)
        )
        if wrong:
            raise ConfigError(f"{wrong} targets are outside of the vocabulary of {vocab}")
        ctx.save_for_backward(h, head, targets, weights, total)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        h, head, targets, weights, total = ctx.saved_tensors
        dloss, dh = dloss.contiguous(), torch.empty_like(h)
        into, returned = _gradients(ctx, 2, (head,))
        ctx.library.scalinglab_head_backward(
            *ctx.sizes, ctx.multiplier, _at(dloss), _at(h), *_weight(head), _at(targets), _at(weights), _at(total),
            _at(dh), *into,
        )  # fmt: skip
        return None, dh, *returned, None, None, None


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, weights: Tensor, sources: Tensor) -> Tensor:
        weights, sources = weights.contiguous(), sources.contiguous()
        *lead, count, width = sources.shape
        rows, sums = lead[0] * lead[1] * lead[2], weights.shape[-2]
        share = rows // (weights.shape[0] * weights.shape[1] * weights.shape[2])
        ctx.library, ctx.sizes = library, (rows, share, sums, count, width)
        y = _buffer(*lead, sums, width)
        library.scalinglab_mix_forward(*ctx.sizes, _at(weights), _at(sources), _at(y))
        ctx.save_for_backward(weights, sources)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(FIRST_ONLY)
        weights, sources = ctx.saved_tensors
        dy, dweights, dsources = dy.contiguous(), torch.empty_like(weights), torch.empty_like(sources)
        ctx.library.scalinglab_mix_backward(
            *ctx.sizes, _at(dy), _at(weights), _at(sources), _at(dweights), _at(dsources)
        )
        return None, dweights, dsources


class _Sinkhorn(Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, logits: Tensor, iterations: int) -> Tensor:
        logits = logits.contiguous()
        n = logits.shape[-1]
        ctx.library, ctx.sizes = library, (logits.numel() // n**2, n, iterations)
        y = torch.empty_like(logits)
        library.scalinglab_sinkhorn_forward(*ctx.sizes, _at(logits), _at(y))
        ctx.save_for_backward(logits)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(FIRST_ONLY)
        (logits,) = ctx.saved_tensors
        dy, dlogits = dy.contiguous(), torch.empty_like(logits)
        ctx.library.scalinglab_sinkhorn_backward(*ctx.sizes, _at(dy), _at(logits), _at(dlogits))
        return None, dlogits, None


def _check(x: Tensor, *weights: tuple[str, Tensor, Sequence[int]]) -> None:
    """Sizes, dtypes and devices: a kernel would read past a wrong one."""
    if x.dim() != 4:
        raise ConfigError(f"activations {tuple(x.shape)} must be [replica, sequence, position, channel]")
    replicas = x.shape[0]
    for name, weight, shape in (("activations", x, x.shape[1:]), *weights):
        if weight.shape != (replicas, *shape):
            raise ConfigError(f"{name} is {tuple(weight.shape)}; the activations need {(replicas, *shape)}")
        if weight.dtype != torch.float32 or not weight.is_cpu:
            raise ConfigError(
                f"{name} is {weight.dtype} on {weight.device}; the native kernels take float32 on the CPU"
            )


def _rows(x: Tensor) -> tuple[int, int, int]:
    """Replicas, tokens and width of [k, b, t, d]."""
    replicas, sequences, length, width = x.shape
    return replicas, sequences * length, width


def _inside(weight: Tensor) -> Tensor:
    """The weight itself if every replica is contiguous, else a copy."""
    inside = (1,) if weight.dim() == 2 else (weight.shape[2], 1)
    return weight if weight.stride()[1:] == inside else weight.contiguous()


def _gradients(ctx: Any, first: int, weights: Sequence[Tensor | None]) -> tuple[list[int | None], list[Tensor | None]]:
    """Where the kernels add the gradients of inputs `first`, ... (pointer, stride, ...), and what autograd gets."""
    if torch.is_grad_enabled():
        raise RuntimeError(FIRST_ONLY)
    into: list[int | None] = []
    returned: list[Tensor | None] = []
    for need, weight in zip(ctx.needs_input_grad[first:], weights, strict=False):
        target, gives = None, None
        if need and weight is not None:
            target = weight.grad if weight.is_leaf else None
            if target is None or target.stride()[1:] != weight.stride()[1:] or target.dtype != weight.dtype:
                target = gives = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        into += _weight(target)
        returned.append(gives)
    return into, returned


def _buffer(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device="cpu")  # whatever the defaults are


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _weight(weight: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if weight is None else (weight.data_ptr(), weight.stride()[0])


def _weights(weights: Sequence[Tensor | None]) -> list[int | None]:
    return [part for weight in weights for part in _weight(weight)]


def _tables(tables: list[Tensor]) -> tuple[int | None, ...]:
    return tuple(table.data_ptr() for table in tables) or (None, None)
