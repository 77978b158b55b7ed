"""Stacked replicas: equal to solo runs of the plain model under torch's own AdamW, and independent of each other."""

import math

import pytest

pytest.importorskip("torch")

import msgspec
import torch

from scalinglab.arch_options import OPTIONS
from scalinglab.config import Base, Optimizer, RunConfig, ShapeSpec
from scalinglab.errors import ConfigError
from scalinglab.train.scaling import build, groups, optimizer
from scalinglab.train.stack import Stack

SHAPE = ShapeSpec(depth=2, width=16, heads=2, ffn_dim=32, vocab=16, context=12)
CONFIG = RunConfig(shape=SHAPE, lr=4e-3, tokens=1000, corpus="automaton", precision="fp64", norm_eps=1e-8)
BASE = Base(depth=1, width=8, head_dim=4, ffn_dim=16)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def data(seed, step, batch=3):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    drawn = torch.randint(0, 16, (batch, SHAPE.context + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def solo(config, steps):
    model = build(config)
    adamw = optimizer(model, config)
    losses, peaks = [], [group["lr"] for group in adamw.param_groups]
    for step in range(steps):
        for group, peak in zip(adamw.param_groups, peaks, strict=True):
            group["lr"] = peak * scale(step)
        loss = model.loss(*data(config.seed, step))
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        adamw.step()
        losses.append(loss.item())
    return losses, model


def scale(step):
    return min(1.0, (step + 1) / 10)


def stacked(configs, steps, *, broken=None):
    stack = Stack(configs)
    losses = []
    for step in range(steps):
        tokens, targets = (torch.stack(x) for x in zip(*(data(c.seed, step) for c in configs), strict=True))
        losses_k = stack.model.nats(tokens, targets).mean((1, 2))
        stack.backward(losses_k)
        if broken is not None and step == broken[1]:
            stack.grads[broken[0], 7] = math.nan
        stack.update(losses_k.detach(), scale(step))
        losses.append(losses_k.tolist())
    return losses, stack


def variants(**fields):
    decays = [Optimizer(weight_decay=w, grad_clip=c) for w, c in ((2e-4, 1.0), (0.0, 0.5), (1e-3, math.inf))]
    return [
        msgspec.structs.replace(CONFIG, seed=seed, lr=lr, optimizer=o, **fields)
        for seed, lr, o in zip((0, 1, 1), (4e-3, 1e-3, 8e-3), decays, strict=True)
    ]


@pytest.mark.parametrize("architecture", sorted(OPTIONS))
def test_every_architecture_stacks(architecture):
    configs = variants(architecture=architecture)
    losses, stack = stacked(configs, 8)
    for k, config in enumerate(configs):
        alone, model = solo(config, 8)
        torch.testing.assert_close([row[k] for row in losses], alone, rtol=1e-10, atol=1e-12)
        for name, weight in stack.weights(k).items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-8, atol=1e-10)


def test_a_hundred_steps_in_float64():
    # The bar of the design: 1e-10 over 100 steps, with different seeds, learning rates, decay and clipping.
    configs = variants(parametrization="completep", base=BASE)
    losses, _ = stacked(configs, 100)
    for k, config in enumerate(configs):
        torch.testing.assert_close([row[k] for row in losses], solo(config, 100)[0], rtol=0, atol=1e-10)


def test_float32_stays_within_1e4():
    configs = variants(precision="fp32")
    losses, _ = stacked(configs, 60)
    for k, config in enumerate(configs):
        torch.testing.assert_close([row[k] for row in losses], solo(config, 60)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_diverged_replica_leaves_the_others_bit_equal(precision):
    configs = variants(precision=precision)
    healthy, whole = stacked(configs, 12)
    broken, stack = stacked(configs, 12, broken=(1, 4))
    assert stack.alive.tolist() == [True, False, True]
    for k in (0, 2):
        assert torch.equal(stack.params[k], whole.params[k])
        assert [row[k] for row in broken] == [row[k] for row in healthy]
    frozen = stacked(configs, 4)[1].params[1]
    assert torch.equal(stack.params[1], frozen)  # the weights before the step that broke, still finite


def test_a_replica_does_not_depend_on_its_stack():
    configs = variants()
    together, _ = stacked(configs, 20)
    alone, _ = stacked(configs[1:2], 20)
    torch.testing.assert_close([row[1] for row in together], [row[0] for row in alone], rtol=0, atol=1e-11)


def test_state_continues_exactly():
    configs = variants()
    _, through = stacked(configs, 9)
    _, first = stacked(configs, 5)
    resumed = Stack(configs)
    resumed.load_state({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.state().items()})
    for step in range(5, 9):
        tokens, targets = (torch.stack(x) for x in zip(*(data(c.seed, step) for c in configs), strict=True))
        losses_k = resumed.model.nats(tokens, targets).mean((1, 2))
        resumed.backward(losses_k)
        resumed.update(losses_k.detach(), scale(step))
    assert torch.equal(resumed.params, through.params)


def test_runs_that_differ_in_more_are_refused():
    with pytest.raises(ConfigError, match="differ in batch; a stack's runs may differ in seed"):
        Stack([CONFIG, msgspec.structs.replace(CONFIG, batch=3)])
    with pytest.raises(ConfigError, match="at least one run"):
        Stack([])


def test_groups_hold_learning_rate_times_decay():
    config = msgspec.structs.replace(CONFIG, parametrization="completep", base=BASE)
    for group in groups(build(config), config):
        decayed = group.tag.role != "vector"
        assert group.lr * group.weight_decay == pytest.approx(2e-4 if decayed else 0.0, rel=1e-12)


def test_fan_in_counts_per_tensor():
    # ffn_dim doubles and width doubles: 32/16 and 16/8; but a wider ffn must move `down` alone.
    wide = msgspec.structs.replace(SHAPE, ffn_dim=64)
    config = msgspec.structs.replace(CONFIG, shape=wide, parametrization="mup", base=BASE)
    rates = {g.name: g.lr / config.lr for g in groups(build(config), config)}
    assert rates["blocks.0.ffn.down_df"] == pytest.approx(1 / 4)
    assert rates["blocks.0.ffn.up_fd"] == rates["blocks.1.attention.query_hd"] == pytest.approx(1 / 2)
    assert rates["embedding_vd"] == rates["head_vd"] == rates["final_norm.gain_d"] == 1.0


def test_initial_spread_follows_the_table():
    config = msgspec.structs.replace(CONFIG, parametrization="mup", base=BASE)
    plain, scaled = build(CONFIG), build(config)
    for name, param in plain.named_parameters():
        ratio = 0.5**0.5 if "blocks" in name and "norm" not in name else 1.0
        torch.testing.assert_close(scaled.get_parameter(name).detach(), param.detach() * ratio, rtol=1e-12, atol=0)


@pytest.mark.parametrize("parametrization", ["mup", "depth_mup", "completep", "alpha=0.75", "native"])
def test_all_agree_at_the_base_shape(parametrization):
    base = Base(depth=2, width=16, head_dim=8, ffn_dim=32)
    scaled = msgspec.structs.replace(CONFIG, parametrization=parametrization, base=base)
    assert solo(scaled, 3)[0] == solo(CONFIG, 3)[0]


def test_a_forward_multiplier_that_cannot_be_applied():
    config = msgspec.structs.replace(
        CONFIG, parametrization="mup", base=BASE, perturb={"matrix.branch.forward": {"width": -1.0}}
    )
    with pytest.raises(ConfigError, match=r"forward multiplier 0.5 for matrix.branch"):
        build(config)
