"""The native kernels against the torch layers in float64, which are a second implementation of the same formulas.

Tolerance: float32 rounds by 6e-8 and sums of a few hundred terms lose about a digit; measured errors (norm of the
difference over norm) are 1e-7 to 1e-6. 1e-5 leaves a factor of ten and is far below any wrong formula.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from msgspec.structs import replace
from torch.func import functional_call
from torch.nn import functional

from scalinglab.config import RunConfig, ShapeSpec
from scalinglab.errors import ConfigError
from scalinglab.shapes import Shape
from scalinglab.train import fused
from scalinglab.train.archs import mhc
from scalinglab.train.fused import FusedUnavailable, build
from scalinglab.train.fused.shelves import Buffers
from scalinglab.train.layers import Attention, FeedForward, RMSNorm, rotary
from scalinglab.train.stack import Stack

MISSING = fused.available()
BUILT = None if MISSING else fused.load().library._name
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
TOLERANCE = 1e-5
EPS, SCALE, MULTIPLIER = 1e-6, 0.3, 0.7


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison: replicas, sequences, positions, width, heads, kv heads, head size, f, vocabulary."""

    k: int
    b: int
    t: int
    d: int
    h: int
    g: int
    c: int
    f: int
    v: int
    ffn: str = "swiglu"
    rope: bool = True

    @property
    def shape(self) -> Shape:
        return Shape(
            1, self.d, ffn_dim=self.f, heads=self.h, head_dim=self.c, kv_heads=self.g, vocab=self.v, context=self.t,
            ffn=self.ffn,
        )  # fmt: skip

    def matrices(self) -> dict[str, tuple[int, ...]]:
        wide, narrow = self.h * self.c, self.g * self.c
        sizes: dict[str, tuple[int, ...]] = {
            "gain_d": (self.d,),
            "query_hd": (wide, self.d),
            "key_kd": (narrow, self.d),
            "value_kd": (narrow, self.d),
            "output_dh": (self.d, wide),
            "up_fd": (self.f, self.d),
            "down_df": (self.d, self.f),
            "head_vd": (self.v, self.d),
        }
        return sizes | ({"gate_fd": (self.f, self.d)} if self.ffn == "swiglu" else {})


CASES = [
    Case(3, 2, 128, 32, 4, 4, 8, 80, 256),
    Case(1, 3, 37, 24, 2, 2, 12, 64, 77),  # partial vectors everywhere
    Case(3, 2, 64, 16, 4, 2, 8, 48, 8, "gelu", rope=False),
    Case(3, 2, 13, 40, 6, 2, 4, 50, 80, "gelu"),  # groups of three, heads * head_dim != width
    Case(1, 2, 129, 33, 3, 3, 10, 31, 5),  # odd everything
    Case(1, 2, 61, 20, 3, 1, 7, 24, 80, rope=False),  # odd head size, one key/value head
    Case(3, 1, 48, 8, 1, 1, 24, 16, 256, "gelu", rope=False),  # attention wider than the stream
    Case(1, 1, 200, 64, 2, 2, 32, 176, 80),
    Case(1, 1, 340, 16, 1, 1, 16, 340, 16),  # sums past the 320 terms that are worked off at once
    Case(1, 1, 7, 336, 1, 1, 16, 8, 336, "gelu"),
]


def names(case: Case) -> str:
    return "-".join(str(value) for value in vars(case).values())


def stacked(case: Case, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Leaves [k, ...] that are views of one buffer [k, P], with a gradient buffer of the same strides."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(math.prod(size) for size in case.matrices().values()) + 5
    flat, grads = torch.randn(case.k, total, generator=generator), torch.zeros(case.k, total)
    weights, start = {}, 3
    for name, size in case.matrices().items():
        stop = start + math.prod(size)
        leaf = flat[:, start:stop].unflatten(1, size)
        leaf.mul_(1.0 if name == "gain_d" else size[-1] ** -0.5)
        weights[name] = leaf.detach().requires_grad_()
        weights[name].grad = grads[:, start:stop].unflatten(1, size)
        start = stop
    return weights, grads


def data(case: Case, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, targets and the gradient that comes from above (not 1, of both signs)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.k, case.b, case.t, case.d, generator=generator).requires_grad_()
    targets = torch.randint(case.v, (case.k, case.b, case.t), generator=generator)
    return x, targets, torch.randn(case.k, case.b, case.t, generator=generator)


def native_loss(case: Case, w: dict[str, torch.Tensor], x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kernels, positions = fused.load(), rotary(case.t, case.c, 1e4, x) if case.rope else None
    a = kernels.attention(
        kernels.norm(x, w["gain_d"], EPS), w["query_hd"], w["key_kd"], w["value_kd"], w["output_dh"],
        head_dim=case.c, scale=SCALE, positions=positions,
    )  # fmt: skip
    y = x + a + kernels.feed_forward(x + a, w.get("gate_fd"), w["up_fd"], w["down_df"])
    return kernels.head_loss(y, w["head_vd"], targets, MULTIPLIER)


def layers_loss(case: Case, w: dict[str, torch.Tensor], x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same through `layers.py`, one replica at a time."""
    norm, attention, ffn = RMSNorm(case.d, EPS, "branch"), Attention(case.shape, SCALE), FeedForward(case.shape)
    positions = rotary(case.t, case.c, 1e4, x) if case.rope else None
    losses = []
    for k in range(case.k):

        def call(module: torch.nn.Module, *inputs: object, k: int = k) -> torch.Tensor:
            return functional_call(module, {name: w[name][k] for name, _ in module.named_parameters()}, inputs)

        a = call(attention, call(norm, x[k]), positions)
        y = x[k] + a + call(ffn, x[k] + a)
        logits = (y @ w["head_vd"][k].T * MULTIPLIER).flatten(0, 1)
        losses.append(functional.cross_entropy(logits, targets[k].flatten(), reduction="none").view(case.b, case.t))
    return torch.stack(losses)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.detach().double() - expected.detach()).norm() / expected.detach().norm())


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=names)
def test_values_and_gradients_equal_the_torch_layers(case: Case) -> None:
    weights, _ = stacked(case)
    x, targets, above = data(case)
    loss = native_loss(case, weights, x, targets)
    (loss * above).sum().backward()
    exact = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    exact_x = x.detach().double().requires_grad_()
    expected = layers_loss(case, exact, exact_x, targets)
    (expected * above).sum().backward()
    assert error(loss, expected) < TOLERANCE
    assert error(x.grad, exact_x.grad) < TOLERANCE
    for name, weight in weights.items():
        assert error(weight.grad, exact[name].grad) < TOLERANCE, name


@needs_kernels
def test_gradients_are_added_to_a_buffer_or_returned() -> None:
    case = CASES[0]
    weights, grads = stacked(case)
    x, targets, above = data(case)
    buffer = weights["up_fd"].grad.data_ptr()
    (native_loss(case, weights, x, targets) * above).sum().backward()
    once = grads.clone()
    x.grad = None
    (native_loss(case, weights, x, targets) * above).sum().backward()
    assert weights["up_fd"].grad.data_ptr() == buffer
    assert error(grads, 2 * once.double()) < TOLERANCE  # added, not written
    plain = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    returned = torch.autograd.grad((native_loss(case, plain, x, targets) * above).sum(), list(plain.values()))
    start = 3
    for (name, size), gradient in zip(case.matrices().items(), returned_in_order(plain, returned, case), strict=True):
        stop = start + math.prod(size)
        assert torch.equal(gradient, once[:, start:stop].unflatten(1, size)), name
        start = stop


def returned_in_order(
    plain: dict[str, torch.Tensor], returned: tuple[torch.Tensor, ...], case: Case
) -> list[torch.Tensor]:
    by_name = dict(zip(plain, returned, strict=True))
    return [by_name[name] for name in case.matrices()]


@needs_kernels
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_frozen_weights_and_transposed_views() -> None:
    case = CASES[0]
    weights, _ = stacked(case)
    x, _, _ = data(case)
    up, down = (weights[name].detach().clone() for name in ("up_fd", "down_df"))
    turned = up.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # not contiguous inside
    plain = up.clone().requires_grad_()
    plain.grad = torch.zeros_like(turned)  # a buffer that the kernels can't add to
    fused.load().feed_forward(x.detach(), None, plain, down).sum().backward()
    y = fused.load().feed_forward(x, None, turned, down)  # `down` is frozen
    y.sum().backward()
    assert down.grad is None
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, up)]
    expected = functional.gelu(exact[0] @ exact[1].unsqueeze(1).mT) @ down.double().unsqueeze(1).mT
    expected.sum().backward()
    assert error(y, expected) < TOLERANCE
    assert error(turned.grad, exact[1].grad) < TOLERANCE
    assert error(plain.grad, exact[1].grad) < TOLERANCE


@needs_kernels
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=names)
def test_bits_repeat_and_do_not_depend_on_the_stack(case: Case) -> None:
    def run(only: int | None) -> list[torch.Tensor]:
        weights, _ = stacked(case)
        x, targets, above = data(case)
        if only is not None:  # one replica by itself
            weights = {name: weight.detach()[only : only + 1].clone() for name, weight in weights.items()}
            for weight in weights.values():
                weight.requires_grad_().grad = torch.zeros_like(weight)
            x, targets, above = (value.detach()[only : only + 1].clone() for value in (x, targets, above))
            x.requires_grad_()
        size = case if only is None else Case(**{**vars(case), "k": 1})
        loss = native_loss(size, weights, x, targets)
        (loss * above).sum().backward()
        return [loss.detach(), x.grad, *(weight.grad for weight in weights.values())]

    together = run(None)
    assert all(torch.equal(a, b) for a, b in zip(together, run(None), strict=True))
    for k in range(case.k):
        assert all(torch.equal(a[k], b[0]) for a, b in zip(together, run(k), strict=True))


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "gain_d", "query_hd", "value_kd", "up_fd", "head_vd"])
def test_a_diverged_replica_is_nan_and_touches_no_other(bad: float, where: str) -> None:
    case = CASES[0]

    def run(spoil: bool) -> list[torch.Tensor]:
        weights, _ = stacked(case)
        x, targets, above = data(case)
        with torch.no_grad():
            if spoil:
                (x if where == "x" else weights[where])[1].fill_(bad)
        loss = native_loss(case, weights, x, targets)
        (loss * above).sum().backward()
        return [loss.detach(), x.grad, *(weight.grad for weight in weights.values())]

    sound, spoiled = run(False), run(True)
    for a, b in zip(sound, spoiled, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert not spoiled[0][1].isfinite().any()
    assert not spoiled[1][1].isfinite().any()


@needs_kernels
def test_one_nan_among_the_logits_is_enough() -> None:
    case = CASES[1]
    weights, _ = stacked(case)
    x, targets, _ = data(case)
    head, row = weights["head_vd"].detach().clone(), int(targets.min())
    for spoiled in (row, 76):  # a target of some tokens, and the last column of all, in a partial vector
        spoilt = head.clone()
        spoilt[0, spoiled] = math.nan
        assert fused.load().head_loss(x, spoilt, targets).isnan().all()
    up, down = weights["up_fd"].detach().clone(), weights["down_df"].detach()
    up[0, 5] = math.nan
    for gate in (None, weights["gate_fd"].detach(), up):
        assert fused.load().feed_forward(x, gate, up if gate is not up else weights["up_fd"], down).isnan().all()


@needs_kernels
def test_causality_and_large_logits() -> None:
    case = CASES[1]
    weights, _ = stacked(case)
    x, targets, _ = data(case)
    later = x.detach().clone()
    later[:, :, 20:] += 1e3  # the past must not see this, not by a bit
    loss, changed = (native_loss(case, weights, inputs, targets) for inputs in (x, later))
    assert torch.equal(loss[:, :, :20], changed[:, :, :20])
    assert not torch.equal(loss[:, :, 20:], changed[:, :, 20:])
    # Logits of a few hundred: exp would overflow without the maximum, and most weights underflow.
    h, head = torch.randn(1, 1, 50, 24), torch.randn(1, 77, 24)
    far = fused.load().head_loss(h, head, targets[:1, :1, :1].expand(1, 1, 50), 100.0)
    expected = functional.cross_entropy(
        (h[0, 0] @ head[0].T).double() * 100, targets[0, 0, :1].expand(50), reduction="none"
    )
    assert error(far, expected) < TOLERANCE


@needs_kernels
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_activations_far_out(sign: float) -> None:
    # With identity matrices the feed-forward is its activation: exact values of torch in float64 over all magnitudes.
    x = sign * torch.logspace(-6, 2.5, 64).view(1, 1, 8, 8)
    eye = torch.eye(8)[None]
    kernels = fused.load()
    gelu, silu = functional.gelu(x.double()), functional.silu(x.double()) * x
    # The error function is good to 1e-7 absolutely, times x.
    assert ((kernels.feed_forward(x, None, eye, eye) - gelu).abs() <= 5e-7 * x.abs()).all()
    assert ((kernels.feed_forward(x, eye, eye, eye) - silu).abs() <= 1e-6 * silu.abs() + 1e-30).all()


@needs_kernels
def test_numerical_derivative_in_a_direction() -> None:
    # Independent of any other implementation: symmetric differences of the kernels' own loss, summed in float64.
    case = Case(1, 2, 11, 12, 3, 1, 4, 10, 9)
    weights, _ = stacked(case)
    x, targets, above = data(case)
    (native_loss(case, weights, x, targets) * above).sum().backward()
    generator = torch.Generator().manual_seed(5)
    step = 3e-3
    for name, weight in weights.items():
        direction = torch.randn(weight.shape, generator=generator)
        direction /= direction.norm()

        def shifted(by: float, name: str = name, direction: torch.Tensor = direction) -> float:
            moved = {**weights, name: weights[name].detach() + by * direction}
            with torch.no_grad():
                return float((native_loss(case, moved, x.detach(), targets).double() * above).sum())

        slope = (shifted(step) - shifted(-step)) / (2 * step)
        analytic = float((weight.grad.double() * direction).sum())
        assert slope == pytest.approx(analytic, rel=5e-3, abs=5e-3), name  # rounding 1e-6/step, curvature step²


@needs_kernels
def test_no_gradient_no_graph_and_no_second_derivative() -> None:
    case = CASES[1]
    weights, _ = stacked(case)
    x, targets, _ = data(case)
    with torch.no_grad():
        alone = native_loss(case, weights, x, targets)
    assert not alone.requires_grad
    loss = native_loss(case, weights, x, targets)
    assert torch.equal(alone, loss)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)


@needs_kernels
def test_threads_at_once_get_the_same_bits() -> None:
    case = CASES[0]
    weights, _ = stacked(case)
    x, targets, _ = data(case)

    def evaluate(_: int) -> torch.Tensor:
        with torch.no_grad():
            return native_loss(case, weights, x, targets)

    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(evaluate, range(12)))
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@needs_kernels
def test_other_defaults_of_torch_change_nothing() -> None:
    case = CASES[1]
    weights, _ = stacked(case)
    x, targets, _ = data(case)
    expected = native_loss(case, weights, x, targets)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(native_loss(case, weights, x, targets), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_kernels
def test_bad_inputs_are_refused_before_memory_is_touched() -> None:
    kernels, x = fused.load(), torch.zeros(2, 1, 4, 8)
    square, wide = torch.zeros(2, 8, 8), torch.zeros(2, 16, 8)
    with pytest.raises(ConfigError, match="gain is .2, 9."):
        kernels.norm(x, torch.zeros(2, 9), EPS)
    with pytest.raises(ConfigError, match="must be .replica, sequence"):
        kernels.norm(x[0], torch.zeros(1, 8), EPS)
    with pytest.raises(ConfigError, match="float64 on cpu"):
        kernels.norm(x.double(), torch.zeros(2, 8), EPS)
    with pytest.raises(ConfigError, match="down is"):
        kernels.feed_forward(x, None, wide, square)
    with pytest.raises(ConfigError, match="whole groups of heads of 3"):
        kernels.attention(x, square, square, square, square, head_dim=3, scale=1.0, positions=None)
    with pytest.raises(ConfigError, match="rotary positions"):
        kernels.attention(x, *[square] * 4, head_dim=8, scale=1.0, positions=rotary(3, 8, 1e4, x))
    for target in (-1, 16):
        with pytest.raises(ConfigError, match="1 targets are outside of the vocabulary of 16"):
            kernels.head_loss(x, wide, torch.tensor([0] * 7 + [target]).view(2, 1, 4))
    with pytest.raises(ConfigError, match="must be int64"):
        kernels.head_loss(x, wide, torch.zeros(2, 1, 4))


@needs_kernels
@pytest.mark.parametrize("params", [5, 64, 77])
def test_adamw_equals_the_optimiser_of_torch(params: int) -> None:
    # Each replica against torch.optim.AdamW in float64 with one group per parameter, after clipping by a known factor.
    generator = torch.Generator().manual_seed(params)
    replicas, steps, betas = 3, 4, (0.9, 0.95)
    start = torch.randn(replicas, params, generator=generator)
    grads = torch.randn(steps, replicas, params, generator=generator)
    lr_p, eps_p = torch.rand(params, generator=generator) + 0.5, torch.logspace(-8, -1, params)
    decay_p = torch.randint(2, (params,), generator=generator).float()
    lr_k, decay_k = torch.tensor([1e-3, 3e-2, 0.0]), torch.tensor([0.1, 0.0, 0.3])
    clip_k = torch.tensor([1.0, 0.25, 0.5])
    param, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(steps):
        fused.load().adamw_(
            param, grads[step], mean, square, step=step + 1, betas=betas, lr_p=lr_p, weight_decay_p=decay_p,
            eps_p=eps_p, lr_k=lr_k, weight_decay_k=decay_k, clip_k=clip_k,
        )  # fmt: skip
    for k in range(replicas):
        leaves = [value.double().requires_grad_() for value in start[k].detach().unbind()]
        groups = [
            {
                "params": [leaf],
                "lr": float(lr_k[k].double() * lr_p[i].double()),
                "eps": float(eps_p[i]),
                "weight_decay": float(decay_k[k].double() * decay_p[i].double()),
            }
            for i, leaf in enumerate(leaves)
        ]
        optimizer = torch.optim.AdamW(groups, betas=betas)
        for step in range(steps):
            for leaf, value in zip(leaves, grads[step, k].double() * float(clip_k[k]), strict=True):
                leaf.grad = value
            optimizer.step()
        moved = torch.stack(leaves).detach() - start[k].double()
        if lr_k[k] == 0:
            assert torch.equal(param[k], start[k])
        else:  # the move, not the value, so that a wrong step can't hide behind it; values round by 6e-8 of about 3
            assert (param[k].double() - start[k].double() - moved).abs().max() < 1e-5 * moved.abs().max() + 1e-6


@needs_kernels
def test_adamw_refuses_what_it_would_misread() -> None:
    flat, row, column = torch.zeros(2, 6), torch.zeros(6), torch.zeros(2)

    def step(param: torch.Tensor, row: torch.Tensor, number: int = 1) -> None:
        fused.load().adamw_(
            param, flat, flat, flat, step=number, betas=(0.9, 0.95), lr_p=row, weight_decay_p=row, eps_p=row,
            lr_k=column, weight_decay_k=column, clip_k=column,
        )  # fmt: skip

    with pytest.raises(ConfigError, match="must be float32 .2, 6. on the CPU and contiguous"):
        step(torch.zeros(6, 2).T, row)
    with pytest.raises(ConfigError, match="must be float32 .6,."):
        step(flat, row.double())
    with pytest.raises(ConfigError, match="step=0"):
        step(flat, row, 0)


@needs_kernels
def test_what_the_kernels_refuse() -> None:
    kernels, shape = fused.load(), CASES[4].shape
    assert kernels.refuses(shape, dtype=torch.float32) is None
    assert kernels.refuses(shape, dtype=torch.float32, device=torch.device("cpu")) is None
    assert "not in float64" in str(kernels.refuses(shape, dtype=torch.float64))
    assert "not on cuda" in str(kernels.refuses(shape, dtype=torch.float32, device="cuda"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and nothing remembered from other tests."""
    monkeypatch.setenv("SCALINGLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "processor_features", lambda: frozenset({"avx2", "fma"}))
    fused.load.cache_clear()
    yield tmp_path
    fused.load.cache_clear()


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(FusedUnavailable, match="need a C\\+\\+ compiler .* none on PATH"):
        fused.load()
    assert "use the torch backend" in str(fused.available())
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(FusedUnavailable, match="CXX names 'no-such-compiler'"):
        fused.load()


def test_without_avx2(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor_features", lambda: frozenset({"avx", "fma"}))
    with pytest.raises(ConfigError, match="need a processor with avx2"):
        fused.load()


def compiler(folder: Path, body: str) -> str:
    """A stand-in for a compiler: it knows --version and does `body` else."""
    path = folder / "fake-c++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(fresh, 'echo "kernels.cpp:7: no such thing" >&2; exit 1'))
    with pytest.raises(FusedUnavailable, match="can't compile the native kernels: kernels.cpp:7: no such thing"):
        fused.load()
    monkeypatch.setenv("CXX", compiler(fresh, 'while [ "$1" != -o ]; do shift; done; echo text > "$2"'))
    with pytest.raises(FusedUnavailable, match="can't be loaded"):
        fused.load()


def test_a_cache_that_cannot_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(fresh, 'while [ "$1" != -o ]; do shift; done; echo text > "$2"'))
    (fresh / "file").write_text("")
    monkeypatch.setenv("SCALINGLAB_CACHE", str(fresh / "file" / "cache"))
    with pytest.raises(FusedUnavailable, match="set SCALINGLAB_CACHE"):
        fused.load()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALINGLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_folder() == Path("/somewhere/scalinglab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert build.cache_folder() == Path("/home/me/.cache/scalinglab")
    monkeypatch.setenv("SCALINGLAB_CACHE", "/there")
    assert build.cache_folder() == Path("/there")


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SCALINGLAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(FusedUnavailable, match="no home directory .* set SCALINGLAB_CACHE"):
        build.cache_folder()


@needs_kernels
def test_processes_that_build_at_once_and_a_damaged_file(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The stand-in takes half a second and gives the library that this session has built, so all processes overlap.
    built, calls = fresh / "built.so", fresh / "calls"
    built.write_bytes(Path(BUILT).read_bytes())
    body = f'while [ "$1" != -o ]; do shift; done; echo x >> {calls}; sleep 0.5; cp {built} "$2"'
    monkeypatch.setenv("CXX", compiler(fresh, body))
    code = f"import runpy; runpy.run_path({build.__file__!r})['library'](); print('loaded')"  # does not import torch
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["loaded"] * 3
    (made,) = (fresh / "cache").iterdir()  # one file, no leftovers
    assert made.read_bytes() == built.read_bytes()
    made.write_bytes(b"cut off by a full disk")
    build.library()
    assert made.read_bytes() == built.read_bytes()  # built again
    before = calls.read_text()
    build.library()
    assert calls.read_text() == before  # taken from the cache
    (fresh / "fake-c++").write_text((fresh / "fake-c++").read_text().replace("fake 1.0", "fake 2.0"))
    build.library()
    assert len(list((fresh / "cache").iterdir())) == 2  # another compiler, another file


# ------------------------------------------------------------------------------------------------ what topologies add


@pytest.fixture
def kernels() -> fused.Kernels:
    if (reason := fused.available()) is not None:
        pytest.skip(reason)
    return fused.load()


@pytest.mark.parametrize(
    ("lead", "sums", "sources", "width"), [((2, 3, 5), 5, 4, 24), ((2, 3, 5), 1, 9, 17), ((2, 1, 1), 5, 4, 33)]
)
def test_mix_is_a_product_of_small_matrices(kernels, lead, sums, sources, width):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(*lead, sums, sources, generator=generator).requires_grad_()
    x = torch.randn(2, 3, 5, sources, width, generator=generator).requires_grad_()
    upstream = torch.randn(2, 3, 5, sums, width, generator=generator)
    y = kernels.mix(weights, x)
    exact = [v.detach().double().requires_grad_() for v in (weights, x)]
    expected = exact[0] @ exact[1]
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(y, (weights, x), upstream)
    for got, want in zip(found, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_mix_refuses_what_does_not_fit(kernels):
    with pytest.raises(ConfigError, match="don't fit sources"):
        kernels.mix(torch.ones(2, 3, 5, 4, 3), torch.ones(2, 3, 5, 4, 8))


@pytest.mark.parametrize(("n", "iterations"), [(4, 20), (2, 3), (5, 1)])
def test_sinkhorn(kernels, n, iterations):
    generator = torch.Generator().manual_seed(n)
    logits = (torch.randn(2, 3, 7, n, n, generator=generator) * 2).requires_grad_()
    upstream = torch.randn(2, 3, 7, n, n, generator=generator)
    y = kernels.sinkhorn(logits, iterations)
    exact = logits.detach().double().requires_grad_()
    expected = mhc.sinkhorn(exact, iterations)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    (got,), (want,) = (
        torch.autograd.grad(y, logits, upstream), torch.autograd.grad(expected, exact, upstream.double())
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(y.sum(-1), torch.ones(2, 3, 7, n))


DEEP = [
    ("attn_res", {}, {}),
    ("block_attn_res", {"size": 3}, {}),
    ("moda", {}, {}),
    ("moda", {"ffn_cache": False}, {"kv_heads": 1}),
    ("moda", {}, {"heads": 4, "kv_heads": 2}),
    ("moda", {"depth_key_rope": True}, {}),
]


@pytest.mark.parametrize("length", [8, 13, 64])  # whole vectors of tokens, a part of one, more than a block of queries
@pytest.mark.parametrize(("architecture", "options", "changes"), DEEP)
def test_gradients_through_the_shelf_equal_torch_in_float64(kernels, architecture, options, changes, length):
    """A model that reads all earlier sublayers: every parameter's gradient, twice, against the copies that torch makes."""
    spec = {"depth": 4, "width": 12, "heads": 2, "head_dim": 4, "ffn_dim": 24, "vocab": 16, "context": 64} | changes
    run = RunConfig(
        shape=ShapeSpec(**spec), lr=3e-3, tokens=512, corpus="automaton", architecture=architecture, options=options
    )
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 16, (2, 3, length), generator=generator)
    upstream = torch.rand(2, 3, length, generator=generator)
    stack = Stack([run, replace(run, seed=1)])
    with torch.no_grad():  # zero queries would leave the softmax flat and untested
        for parameter in stack.model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    exact = copy.deepcopy(stack.model).double()
    wanted = exact.nats(tokens, tokens)
    wanted.mul(upstream).sum().backward()
    stack.model.use(kernels)
    for _ in range(2):
        stack.model.zero_grad(set_to_none=True)
        found = stack.model.nats(tokens, tokens)
        found.mul(upstream).sum().backward()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
        for (name, got), want in zip(stack.model.named_parameters(), exact.parameters(), strict=True):
            error = (got.grad.double() - want.grad).norm() / want.grad.norm().clamp(min=1e-8)
            assert error < 1e-4, (name, float(error))
    with torch.no_grad():
        assert torch.equal(stack.model.nats(tokens, tokens), found.detach())


def test_a_graph_over_a_shelf_runs_twice(kernels):
    """Gradients are taken from the shelf, so a retained graph gives the same again."""
    x = torch.randn(1, 2, 9, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    query = torch.ones(1, 5).requires_grad_()
    shelf = kernels.shelf(x, 3, 5)
    shelf.put(x)
    shelf.put(2 * x.roll(1, -1))
    y = shelf.read([0, 1], query, 0.0)
    first = torch.autograd.grad(y.sin().sum(), (x, query), retain_graph=True)
    again = torch.autograd.grad(y.sin().sum(), (x, query))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("architecture", ["attn_res", "moda", "pre_ln"])
def test_nothing_of_a_step_stays_in_memory(kernels, architecture):
    """A cycle through autograd's nodes would keep every step: the buffers of a step must go with its graph."""
    run = RunConfig(
        shape=ShapeSpec(depth=3, width=8, heads=2, ffn_dim=16, vocab=16, context=8), lr=3e-3, tokens=64,
        corpus="automaton", architecture=architecture,
    )  # fmt: skip
    stack, tokens = Stack([run]), torch.zeros(1, 2, 8, dtype=torch.int64)
    stack.model.use(kernels)

    def alive() -> int:
        gc.collect()
        return sum(type(x) in (torch.Tensor, Buffers) for x in gc.get_objects())

    counts = []
    for _ in range(4):
        losses_k = stack.model.nats(tokens, tokens).mean((1, 2))
        stack.backward(losses_k)
        stack.update(losses_k.detach(), 1.0)
        del losses_k
        counts.append(alive())
    assert counts[1] == counts[3]


def test_a_shelf_refuses_what_does_not_fit(kernels):
    x = torch.ones(1, 2, 3, 4)
    shelf = kernels.shelf(x, 1, 4)
    with pytest.raises(ConfigError, match="must be one or more of the 0 that are filled"):
        shelf.read([0], torch.ones(1, 4), 0.0)
    with pytest.raises(ConfigError, match="a slot takes float32"):
        shelf.put(torch.ones(1, 2, 3, 5))
    shelf.put(x)
    with pytest.raises(ConfigError, match="has 1 slots and all are filled"):
        shelf.put(x)
    with pytest.raises(ConfigError, match="the query is"):
        shelf.read([0], torch.ones(2, 4), 0.0)
    with pytest.raises(ConfigError, match="must be float32"):
        kernels.shelf(x.double(), 1, 4)
    weight = torch.ones(1, 4, 4)
    with pytest.raises(ConfigError, match="doesn't fit activations"):
        kernels.attention(x, weight, weight, weight, weight, head_dim=2, scale=1.0, positions=None, depth=shelf)


def test_a_nan_on_the_shelf_stays_in_its_replica(kernels):
    x = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    bad = x.clone()
    bad[1, 0, 2, 0] = math.nan
    found = []
    for source in (x, bad):
        leaf = source.clone().requires_grad_()
        shelf = kernels.shelf(leaf, 1, 4)
        y = shelf.read([shelf.put(leaf)], torch.ones(2, 4), 1e-6)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    for clean, touched in zip(*found, strict=True):
        assert torch.equal(clean[0], touched[0])
        assert touched[1, 0, 2].isnan().all()
        assert torch.equal(clean[1, 0, :2], touched[1, 0, :2])


@pytest.mark.parametrize(
    "architecture", ["hyper_connections", "hyper_connections_static", "mhc", "attn_res", "block_attn_res", "moda"]
)
def test_a_topology_trains_on_kernels_as_on_torch(kernels, architecture):
    shape = ShapeSpec(depth=2, width=12, heads=2, ffn_dim=24, vocab=16, context=8)
    configs = [
        RunConfig(shape=shape, lr=3e-3, tokens=64, corpus="automaton", architecture=architecture, seed=seed)
        for seed in range(2)
    ]
    tokens = torch.randint(0, 16, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    stacks = [Stack(configs), Stack(configs)]
    stacks[1].model.use(kernels)
    for _ in range(5):
        losses = []
        for stack in stacks:
            losses_k = stack.model.nats(tokens, tokens).mean((1, 2))
            stack.backward(losses_k)
            stack.update(losses_k.detach(), 1.0)
            losses.append(losses_k.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    assert losses[0].mean() < 2.7  # it learns: log 16 is 2.77
