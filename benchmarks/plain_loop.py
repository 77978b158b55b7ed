"""The peer of the trainer: a decoder and a training loop as people write them by hand, in the manner of nanoGPT.

Same function as our Pre-LN model with GELU, learned positions and a tied readout, same initial distribution, same tokens,
AdamW, clipping at 1; one run after the other, torch's default threads. `python plain_loop.py SPEC.json` runs a list of runs.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-8), nn.RMSNorm(width, eps=1e-8)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, vocab: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-8)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def batch_of(data: np.ndarray, batch: int, context: int):
    starts = torch.randint(len(data) - context - 1, (batch,))
    x = torch.stack([torch.from_numpy(data[i : i + context].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
    return x, y


def run(data: np.ndarray, spec: dict) -> float:
    torch.manual_seed(spec["seed"])
    model = GPT(spec["depth"], spec["width"], spec["heads"], spec["vocab"], spec["context"])
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=spec["lr"], betas=(0.9, 0.95), eps=1e-8)
    steps, warmup = spec["steps"], spec["steps"] // 10
    for step in range(steps):
        done = (step + 1 - warmup) / (steps - warmup)
        share = (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        for group in adamw.param_groups:
            group["lr"] = spec["lr"] * share
        loss = model(*batch_of(data, spec["batch"], spec["context"]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        return float(model(*batch_of(data, spec["sequences"], spec["context"])))


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    text = np.frombuffer(Path(job["text"]).read_bytes(), dtype=np.uint8)
    began = time.time()
    losses = [run(text, spec) for spec in job["runs"]]
    print(json.dumps({"seconds": time.time() - began, "threads": torch.get_num_threads(), "losses": losses}))
