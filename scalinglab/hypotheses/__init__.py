"""Statistical tests about depth: every procedure returns a frozen result that says what was decided and what it stands on.

Cell means, permutations and a mixed model for tables of runs; equivalence and interior optima; tests between fitted laws;
many tests at once and many looks; power, and which runs to train next.
"""

from __future__ import annotations

from scalinglab.hypotheses.cells import (
    Cells,
    cell_means,
    depth_slopes,
    interaction_f,
    lack_of_fit,
    slope_differences,
)
from scalinglab.hypotheses.contrasts import (
    ArchitectureByDepth,
    architecture_by_depth,
    dunnett,
    heteroscedastic_bootstrap,
    max_t_p,
    max_t_quantile,
)
from scalinglab.hypotheses.equivalence import compute_margin, shape_equivalence, sup_equivalence, tost
from scalinglab.hypotheses.further_runs import NextRuns, depth_gap, next_runs
from scalinglab.hypotheses.gaps import gap_test
from scalinglab.hypotheses.interim_looks import Looks, looks, sequential
from scalinglab.hypotheses.interior import Optimum, Quadratic, interior_optimum, quadratic, two_lines, u_shape
from scalinglab.hypotheses.law_tests import NonNested, cox, j_test, nested_bootstrap, vuong
from scalinglab.hypotheses.mixed import mixed_estimates, mixed_interaction
from scalinglab.hypotheses.multiplicity import adjust, e_value
from scalinglab.hypotheses.permutation import freedman_lane, pairs_needed, sign_flip
from scalinglab.hypotheses.power import (
    SeedPlan,
    equivalence_power,
    gap_power,
    gap_se,
    seeds_needed,
    sigma_upper,
    slope_se,
    t_power,
)
from scalinglab.hypotheses.result import HypothesisTest, t_test

__all__ = [
    "ArchitectureByDepth",
    "Cells",
    "HypothesisTest",
    "Looks",
    "NextRuns",
    "NonNested",
    "Optimum",
    "Quadratic",
    "SeedPlan",
    "adjust",
    "architecture_by_depth",
    "cell_means",
    "compute_margin",
    "cox",
    "depth_gap",
    "depth_slopes",
    "dunnett",
    "e_value",
    "equivalence_power",
    "freedman_lane",
    "gap_power",
    "gap_se",
    "gap_test",
    "heteroscedastic_bootstrap",
    "interaction_f",
    "interior_optimum",
    "j_test",
    "lack_of_fit",
    "looks",
    "max_t_p",
    "max_t_quantile",
    "mixed_estimates",
    "mixed_interaction",
    "nested_bootstrap",
    "next_runs",
    "pairs_needed",
    "quadratic",
    "seeds_needed",
    "sequential",
    "shape_equivalence",
    "sigma_upper",
    "sign_flip",
    "slope_differences",
    "slope_se",
    "sup_equivalence",
    "t_power",
    "t_test",
    "tost",
    "two_lines",
    "u_shape",
    "vuong",
]
