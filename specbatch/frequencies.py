"""Are two sets of sampled token sequences draws of one distribution? Exact tests, of the standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

LEVEL = 0.002  # chance that a lossless mode is called a fault, over all tests of a case together
LENGTHS = (1, 2, 3)  # of the n-grams that are counted; 1 is the first token only
ENOUGH = 20  # exceedances after which a permutation test has seen that there is nothing to see
DEPTH = 2  # permutations for each unit of 1/threshold: of a fault, fewer than this many look as different

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Test:
    """One hypothesis: `prompt` answers with the same n-grams of this length either way."""

    prompt: int
    length: int
    p_value: float


def compare(plain: Sequence[Sequence[Tokens]], mode: Sequence[Sequence[Tokens]], *, level: float = LEVEL) -> tuple[list[Test], float]:
    """A test a prompt and n-gram length, and the threshold that a p-value has to stay above.

    `plain[i]` and `mode[i]` hold independent samples of prompt i. The threshold is `level` divided by the number of tests (Bonferroni).
    Longer n-grams are left out where a shorter one has shown the prompt's answers to differ: that takes long, and would say the same.
    """
    threshold = level / max(1, len(plain) * len(LENGTHS))
    tests = []
    for number, (first, second) in enumerate(zip(plain, mode, strict=True)):
        for length in LENGTHS:
            p_value = permutation_p([grams(one, length) for one in first], [grams(one, length) for one in second], threshold)
            tests.append(Test(number, length, p_value))
            if p_value <= threshold:
                break
    return tests, threshold


def grams(tokens: Tokens, length: int) -> list[Tokens]:
    """The first token, or every run of `length` tokens: speculation never drafts the first one, so both are needed."""
    return [tokens[:1]] if length == 1 else [tokens[start : start + length] for start in range(len(tokens) - length + 1)]


def permutation_p(first: Sequence[Sequence[Hashable]], second: Sequence[Sequence[Hashable]], threshold: float) -> float:
    """p-value of the two-sample chi-squared statistic, by reshuffling which sequences belong to which side.

    N-grams of one sequence depend on each other, so whole sequences are reshuffled: exact, whatever the counts, where the two sides are
    exchangeable. Stops early when the answer cannot be close to `threshold` (Besag and Clifford, "Sequential Monte Carlo p-values",
    Biometrika 78, 1991); never 0 (Phipson and Smyth, "Permutation p-values should never be zero", 2010).
    """
    pooled = _numbered([*first, *second])
    totals = Counter(chain.from_iterable(pooled))
    observed = _chi_squared(Counter(chain.from_iterable(pooled[: len(first)])), totals)
    random, exceeded, draws = Random(0), 0, math.ceil(DEPTH / threshold)
    for draw in range(1, draws + 1):
        shuffled = Counter(chain.from_iterable(random.sample(pooled, len(first))))
        exceeded += _chi_squared(shuffled, totals) >= observed * (1 - 1e-12)
        if exceeded == ENOUGH:
            return exceeded / draw
    return (exceeded + 1) / (draws + 1)


def fewer_p(plain: int, mode: int, requests: int) -> float:
    """p-value of "the mode repeats itself as often as plain decoding": `plain` and `mode` of `requests` each did. One-sided, exact.

    Fisher's exact test: with `repeated` in all, the mode's share is hypergeometric.
    """
    repeated = plain + mode
    ways = sum(math.comb(requests, some) * math.comb(requests, repeated - some) for some in range(mode + 1) if some <= repeated)
    return ways / math.comb(2 * requests, repeated)


def _numbered(sequences: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """N-grams as numbers from 0; those that occur once in all tell nothing apart and share number 0."""
    seen = Counter(gram for sequence in sequences for gram in sequence)
    numbers = {gram: number for number, gram in enumerate((gram for gram, times in seen.items() if times > 1), start=1)}
    return [[numbers.get(gram, 0) for gram in sequence] for sequence in sequences]


def _chi_squared(first: Counter[int], totals: Counter[int]) -> float:
    """Chi-squared of two binned samples (Numerical Recipes, 3rd edition, equation 14.3.3); the second is totals - first."""
    size = first.total()
    other = totals.total() - size
    if not size or not other:
        return 0.0
    up, down = math.sqrt(other / size), math.sqrt(size / other)
    return sum(((up + down) * first.get(gram, 0) - down * total) ** 2 / total for gram, total in totals.items())
