"""The sublayers that all architectures share: RMSNorm, rotary positions, attention, feed-forward.

Axes in names: b sequence, t position, s depth slot, h query head, k key/value head, g query heads per key/value head,
c channel of a head, d width, f feed-forward width. Sublayers take an input that is already normalised.

Everything also runs *stacked*: K models of one shape at once, every parameter with a leading replica axis [K, ...] and
every activation [K, b, t, ...]. `linear` and `spread` are all that has to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from scalinglab.errors import ConfigError
from scalinglab.shapes import Shape
from scalinglab.train.roles import Location, tag

Draw: TypeAlias = Callable[[nn.Parameter, float], None]  # fills a parameter with truncated normals of that std
Gain: TypeAlias = Callable[[str], float]  # factor on the initial std by matrix: query key value output gate up down
Rotary: TypeAlias = tuple[Tensor, Tensor] | None  # cosines and sines [t, c / 2]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T over the last axis for a weight [out, in]; for a stacked one [K, out, in] replica by replica."""
    if weight.ndim == 2:
        return functional.linear(x, weight)
    flat_kmi = x.reshape(x.shape[0], -1, x.shape[-1])
    return torch.bmm(flat_kmi, weight.transpose(1, 2)).view(*x.shape[:-1], weight.shape[1])


def spread(param: Tensor, own: int, lead: int = 2) -> Tensor:
    """A parameter with `own` axes, ready to broadcast: stacked, [K, own] becomes [K, 1 (`lead` times: b, t), own]."""
    if param.ndim == own:
        return param
    return param.view(param.shape[0], *[1] * lead, *param.shape[1:])


def mix(weights: Tensor, sources: Tensor, kernels: Any = None) -> Tensor:
    """Weighted sums over few sources, token by token: [.., m, s] times [.., s, d] -> [.., m, d]."""
    if kernels is not None:
        y: Tensor = kernels.mix(weights, sources)
        return y
    if weights.shape[-2] == 1:  # broadcasting is faster than one tiny product per token
        return (weights.transpose(-2, -1) * sources).sum(-2, keepdim=True)
    return weights @ sources


def at_least_float32(x: Tensor) -> Tensor:
    """Float32 for half precision, unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def full_precision(x: Tensor) -> Any:
    """Context in which autocast leaves contractions in the dtype of their inputs, on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)


def normalize(x: Tensor, eps: float, kernels: Any = None) -> Tensor:
    """x / rms(x) over the last axis with statistics in float32 or better; eps = 0 is allowed."""
    if kernels is not None:
        rows_k1md = x.reshape(x.shape[0], 1, -1, x.shape[-1])
        return cast(Tensor, kernels.norm(rows_k1md, x.new_ones(x.shape[0], x.shape[-1]), eps)).view(x.shape)
    return functional.rms_norm(at_least_float32(x), (x.shape[-1],), eps=eps).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x) over the last axis (dropped), in float32 or better."""
    return torch.rsqrt(at_least_float32(x).square().mean(-1) + eps)


class Sublayer(nn.Module):
    """A module that fused kernels can run instead of torch, on stacked tensors; see `scalinglab.train.fused`."""

    kernels: Any = None


class RMSNorm(Sublayer):
    """gain * x / sqrt(mean(x²) + eps), statistics in float32 or better."""

    def __init__(self, width: int, eps: float, location: Location) -> None:
        super().__init__()
        self.eps = eps
        self.gain_d = tag(nn.Parameter(torch.empty(width)), "vector", location, 1)

    def init_weights(self) -> None:
        """Gain one."""
        nn.init.ones_(self.gain_d)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            y: Tensor = self.kernels.norm(x, self.gain_d, self.eps)
            return y
        return normalize(x, self.eps) * spread(self.gain_d, 1)


def rotary(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim / 2] of rotary positions, computed in float64."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device) / head_dim
    angles = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * theta**-half
    dtype = at_least_float32(torch.empty(0, dtype=like.dtype, device="meta")).dtype
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_btc: Tensor, positions: Rotary) -> Tensor:
    """Rotate the halves of each head against each other by position; None leaves them alone."""
    if positions is None:
        return x_btc
    cos, sin = positions
    first, second = at_least_float32(x_btc).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_btc.dtype)


@dataclass
class DepthCache:
    """Keys (before any rotation) and values [b, k, t, c] of earlier sublayers; one cache per forward pass.

    With fused kernels and keys that are not rotated they stand in a `shelf` instead (`scalinglab.train.fused.shelves`).
    """

    rotate_keys: bool
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    writable: bool = True
    shelf: Any = None

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Append one slot, unless the cache is closed."""
        if not self.writable:
            return
        if self.shelf is not None:
            self.shelf.put(torch.cat([x.transpose(-3, -2).flatten(-2) for x in (keys, values)], dim=-1))
            return
        self.keys.append(keys)
        self.values.append(values)


class Attention(Sublayer):
    """Causal self-attention with grouped keys and values, without biases."""

    def __init__(self, shape: Shape, scale: float | None) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.scale = 1 / math.sqrt(shape.head_dim) if scale is None else scale
        kv_heads = shape.kv_heads or shape.heads
        self.group = shape.heads // kv_heads
        wide, narrow, d = shape.heads * shape.head_dim, kv_heads * shape.head_dim, shape.width
        self.query_hd = tag(nn.Parameter(torch.empty(wide, d)), "matrix", "branch", d)
        self.key_kd = tag(nn.Parameter(torch.empty(narrow, d)), "matrix", "branch", d)
        self.value_kd = tag(nn.Parameter(torch.empty(narrow, d)), "matrix", "branch", d)
        self.output_dh = tag(nn.Parameter(torch.empty(d, wide)), "matrix", "branch", wide)

    def init_weights(self, draw: Draw, std: float, gain: Gain) -> None:
        """Truncated normals of `std` times the gain of each matrix."""
        matrices = {"query": self.query_hd, "key": self.key_kd, "value": self.value_kd, "output": self.output_dh}
        for name, matrix in matrices.items():
            draw(matrix, std * gain(name))

    def heads(self, x_btd: Tensor, matrix: Tensor) -> Tensor:
        """Project and split into heads: [b, heads, t, c]."""
        return linear(x_btd, matrix).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def forward(self, x_btd: Tensor, positions: Rotary, depth: DepthCache | None = None) -> Tensor:
        if self.kernels is not None and (depth is None or depth.shelf is not None):
            weights = (self.query_hd, self.key_kd, self.value_kd, self.output_dh)
            shelf, keeps = (None, False) if depth is None else (depth.shelf, depth.writable)
            y_btd: Tensor = self.kernels.attention(
                x_btd, *weights, head_dim=self.head_dim, scale=self.scale, positions=positions, depth=shelf, keeps=keeps
            )
            return y_btd
        q_bhtc = rotate(self.heads(x_btd, self.query_hd), positions)
        plain_bktc, v_bktc = self.heads(x_btd, self.key_kd), self.heads(x_btd, self.value_kd)
        k_bktc = rotate(plain_bktc, positions)
        if depth is not None and depth.keys:
            keys = [rotate(keys, positions) for keys in depth.keys] if depth.rotate_keys else depth.keys
            y_bhtc = joint_attention(q_bhtc, k_bktc, v_bktc, (keys, depth.values), scale=self.scale)
        else:
            if self.group > 1:
                k_bhtc, v_bhtc = (x.repeat_interleave(self.group, dim=-3) for x in (k_bktc, v_bktc))
            else:
                k_bhtc, v_bhtc = k_bktc, v_bktc
            # Fused kernels take four axes: replicas and sequences are one batch.
            q_nhtc, k_nhtc, v_nhtc = (x.flatten(0, -4) for x in (q_bhtc, k_bhtc, v_bhtc))
            y_nhtc = functional.scaled_dot_product_attention(q_nhtc, k_nhtc, v_nhtc, is_causal=True, scale=self.scale)
            y_bhtc = y_nhtc.view(q_bhtc.shape)
        if depth is not None:
            depth.add(plain_bktc, v_bktc)
        return linear(y_bhtc.transpose(-3, -2).flatten(-2), self.output_dh)


def joint_attention(
    q_bhtc: Tensor,
    k_bktc: Tensor,
    v_bktc: Tensor,
    depth: tuple[list[Tensor], list[Tensor]],
    *,
    scale: float,
    depth_bias: float = 0.0,
) -> Tensor:
    """One softmax over the causal sequence and over earlier sublayers of the same token.

    Parameters
    ----------
    q_bhtc, k_bktc, v_bktc : Tensor
        Queries, keys and values of this sublayer; query heads share keys in consecutive groups.
    depth : (keys, values)
        One tensor [b, k, t, c] per depth slot.
    scale : float
        Factor on all logits.
    depth_bias : float
        Added to the depth logits; -inf gives vanilla attention.

    Returns
    -------
    Tensor
        [b, h, t, c]. Position t reads depth slots of position t alone.
    """
    kv_heads, length = k_bktc.shape[-3], q_bhtc.shape[-2]
    q_bkgtc = q_bhtc.unflatten(-3, (kv_heads, -1))
    depth_k_bktsc, depth_v_bktsc = (torch.stack(part, dim=-2) for part in depth)
    causal_tt = torch.ones(length, length, dtype=torch.bool, device=q_bhtc.device).tril()
    sequence = at_least_float32(q_bkgtc @ k_bktc.unsqueeze(-3).transpose(-2, -1)) * scale
    sequence = sequence.masked_fill(~causal_tt, float("-inf"))
    # One small product per token: [g, c] x [c, s].
    q_bktgc = q_bkgtc.transpose(-3, -2)
    across = at_least_float32(q_bktgc @ depth_k_bktsc.transpose(-2, -1)) * scale + depth_bias
    weights = torch.cat([sequence, across.transpose(-3, -2)], dim=-1).softmax(-1).to(v_bktc.dtype)
    along_bkgtt, across_bkgts = weights.split([length, depth_k_bktsc.shape[-2]], dim=-1)
    mixed = along_bkgtt @ v_bktc.unsqueeze(-3) + (across_bkgts.transpose(-3, -2) @ depth_v_bktsc).transpose(-3, -2)
    return mixed.flatten(-4, -3)


class FeedForward(Sublayer):
    """SwiGLU, down(silu(gate x) * up x), or GELU, down(gelu(up x)); without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, f = shape.width, shape.ffn_dim
        gated = shape.ffn == "swiglu"
        self.gate_fd = tag(nn.Parameter(torch.empty(f, d)), "matrix", "branch", d) if gated else None
        self.up_fd = tag(nn.Parameter(torch.empty(f, d)), "matrix", "branch", d)
        self.down_df = tag(nn.Parameter(torch.empty(d, f)), "matrix", "branch", f)

    def init_weights(self, draw: Draw, std: float, gain: Gain) -> None:
        """Truncated normals of `std` times the gain of each matrix."""
        for name, matrix in {"gate": self.gate_fd, "up": self.up_fd, "down": self.down_df}.items():
            if matrix is not None:
                draw(matrix, std * gain(name))

    def forward(self, x_btd: Tensor) -> Tensor:
        if self.kernels is not None:
            y_btd: Tensor = self.kernels.feed_forward(x_btd, self.gate_fd, self.up_fd, self.down_df)
            return y_btd
        up = linear(x_btd, self.up_fd)
        # The exact GELU: its tanh approximation is several times slower on CPUs.
        inner = functional.gelu(up) if self.gate_fd is None else functional.silu(linear(x_btd, self.gate_fd)) * up
        return linear(inner, self.down_df)


def check_positions(shape: Shape, positions: str) -> None:
    """Rotary positions need an even head size; the message says so before torch would."""
    if positions == "rope" and shape.head_dim % 2:
        raise ConfigError(f"head_dim={shape.head_dim} must be even for rotary positions")
