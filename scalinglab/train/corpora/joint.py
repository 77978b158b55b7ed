"""Two choices that make up the difficulty of a sequence, and combinations of them held out of training.

In the spirit of Petty, van Steenkiste, Dasgupta, Sha, Garrette and Linzen (2024), "The impact of depth on compositional
generalization in transformer language models": every part is familiar from training, some combinations are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalinglab.errors import ConfigError
from scalinglab.train.corpora.base import Floats, Ints, Split, entropy_nats, negative_log, pick, require


@dataclass(frozen=True)
class Joint:
    """A distribution over pairs: first, then second given first.

    Attributes
    ----------
    p : float [first, second]
        Sums to 1.
    """

    p: Floats

    def draw(self, uniforms: Floats) -> tuple[Ints, Ints]:
        """First and second choice for uniforms of any shape."""
        cell = pick(uniforms, self.p.ravel())
        return cell // self.p.shape[1], cell % self.p.shape[1]

    @property
    def entropies(self) -> tuple[float, float]:
        """H(first) and H(second | first), nats."""
        first = entropy_nats(self.p.sum(1))
        return first, entropy_nats(self.p.ravel()) - first

    def nats(self, first: Ints, second: Ints) -> tuple[Floats, Floats]:
        """-log P(first) and -log P(second | first), nats; infinite for a pair that doesn't occur."""
        alone = self.p.sum(1)
        with np.errstate(invalid="ignore"):
            given = np.where(alone[:, None] > 0, self.p / alone[:, None], 0.0)
        return negative_log(alone)[first], negative_log(given)[first, second]


def split_joint(
    first: Floats, second: Floats, held_out: tuple[tuple[int, int], ...], names: tuple[str, str]
) -> dict[Split, Joint]:
    """Independent choices, parted into the combinations seen in training and those held out.

    Parameters
    ----------
    first, second : float [A], [B]
        Probabilities of either choice before anything is held out.
    held_out : pairs of positions
        Combinations (row, column) that training never shows.
    names : pair of str
        What the choices are called, for messages.

    Returns
    -------
    dict
        "seen", and "held_out" where there is one: each the product distribution restricted to its side.

    Raises
    ------
    ConfigError
        A held-out value would not be seen in any other combination, so the split would test another thing.
    """
    product = np.outer(first, second)
    out = np.zeros(product.shape, dtype=bool)
    for row, column in held_out:
        out[row, column] = True
    for axis, name in ((1, names[0]), (0, names[1])):
        lost = np.flatnonzero(out.all(axis=axis))
        if lost.size:
            raise ConfigError(
                f"held_out: no combination is left that shows {name} number {int(lost[0]) + 1} in training; "
                f"keep at least one"
            )
    require(len(set(held_out)) == len(held_out), "held_out: a combination is listed twice")
    sides: dict[Split, Joint] = {"seen": Joint(_normed(np.where(out, 0.0, product)))}
    if held_out:
        sides["held_out"] = Joint(_normed(np.where(out, product, 0.0)))
    return sides


def _normed(weights: Floats) -> Floats:
    return np.asarray(weights / weights.sum())
