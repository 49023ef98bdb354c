"""How long a step takes: a linear model, fitted to the steps that were measured.

    seconds = alpha + beta * prefill tokens + gamma * decodes and drafts + delta * context tokens + epsilon * attended
              + zeta * experts

Context tokens are those whose KV is read, over all sequences of the step; attended are the pairs of a prefill token and
a token that it attends to, which long prompts have many of. Experts are the share of a layer's experts that some token
of the step is expected to choose, which grows with ever fewer of them for each token more; dense models lack the term.
This one model serves everybody who asks what a step takes: the budget of a step, the forecast of a first token, the
choice of drafts, and the simulator.

Least squares over an exponentially fading past. What the recent past says nothing about (no prefill for a while, say)
keeps its last estimate: the fit is a ridge around it. No coefficient is ever negative.

The fit looks back over some hundred steps. What else the machine does changes sooner, and slows all kinds of steps
alike: a factor on the whole fit follows the last ten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, sqrt

_SCALES = (1.0, 64.0, 8.0, 4096.0, 64.0 * 4096.0, 0.5)
"""The amount of each feature that counts as one unit, so that the ridge weighs them alike."""
_FADING = 0.995
_RIDGE = 0.3
_FOLLOWING = 0.1
_DISTURBANCE = 1.5
"""No single step counts as slower, or faster, than this times the fit."""
_REFIT_STEPS = 8
_ENOUGH_STEPS = 20
_MOST_PROMPT_TOKENS = 16
"""No more prompt tokens, which attend to nothing, take as long as a decode."""
NAMES = ("alpha_s", "beta_s", "gamma_s", "delta_s", "epsilon_s")
EXPERTS = "zeta_s"
"""The name of the coefficient that only models with experts have, in addition to NAMES."""
_SEARCH_STEPS = 24


class StepTimeModel:
    """Predicts what steps take, and learns from them: the same steps give the same model."""

    def __init__(
        self,
        coefficients: Mapping[str, float] | None = None,
        *,
        learns: bool = True,
        chosen_share: float = 0.0,
    ) -> None:
        """
        Args:
            coefficients: as `as_dict` gives them, known from the start; they stay if `learns` is False.
            chosen_share: the share of a layer's experts that each token chooses; 0 if the model has none.
        """
        self.names = (*NAMES, EXPERTS) if chosen_share else NAMES
        self.coefficients = [
            float(coefficients.get(name, 0.0)) if coefficients else 0.0 for name in self.names
        ]
        """The coefficients of the machine as it is now: the fit times `slowdown`."""
        self.slowdown = 1.0
        self._fit = list(self.coefficients)
        self.num_steps = _ENOUGH_STEPS if coefficients else 0
        self._learns = learns
        self.chosen_share = chosen_share
        self._all = range(len(self.names))
        self._gram = [[0.0] * len(self.names) for _ in self._all]
        self._moment = [0.0] * len(self.names)

    @property
    def is_known(self) -> bool:
        """Whether enough was measured to rely on it."""
        return self.num_steps >= _ENOUGH_STEPS and sum(self.coefficients) > 0.0

    @property
    def attended_each(self) -> float:
        """The prompt tokens that take as long as attending to one token more does."""
        _, beta, _, _, epsilon = self.coefficients[: len(NAMES)]
        return epsilon / beta if beta > 0 else 0.0

    @property
    def context_each(self) -> float:
        """The prompt tokens that take as long as reading the KV of one token, once in a step."""
        _, beta, _, delta, _ = self.coefficients[: len(NAMES)]
        return delta / beta if beta > 0 else 0.0

    @property
    def experts_s(self) -> float:
        """The time that all experts take to read; 0 if there are none."""
        return self.coefficients[-1] if self.chosen_share else 0.0

    def as_dict(self) -> dict[str, float]:
        return dict(zip(self.names, self.coefficients, strict=True))

    def seconds(
        self, num_prefill: float, num_decode: float, num_context: float, num_attended: float = 0.0
    ) -> float:
        return _seconds(self.coefficients, self._amounts(num_prefill, num_decode, num_context, num_attended))

    def fixed_seconds(self, num_decode: float, num_context: float) -> float:
        """The part of a step with many prompt tokens that does not grow with them: they choose every expert."""
        rest_s = self.experts_s * (1.0 - self._touched(num_decode)) if self.chosen_share else 0.0
        return self.seconds(0, num_decode, num_context) + rest_s

    def prefill_within(self, seconds: float, num_decode: float, num_context: float) -> float:
        """Returns the first tokens of a prompt that a step of at most `seconds` has room for.

        The number can be negative, or infinite.
        """
        _, beta, _, _, epsilon = self.coefficients[: len(NAMES)]
        left_s = seconds - self.seconds(0, num_decode, num_context)
        if beta + epsilon <= 0 or left_s == inf:
            return inf
        within = partial(_solved, beta, epsilon)
        if left_s <= 0 or not self.experts_s:
            return within(left_s)
        return self._search(within, left_s, num_decode)

    def _search(self, within: Callable[[float], float], left_s: float, num_decode: float) -> float:
        """The most prefill tokens for which there is room, and for the experts that they add to the decodes'."""
        before = self._touched(num_decode)
        low = max(0.0, within(left_s - self.experts_s * (1.0 - before)))
        high = within(left_s)
        for _ in range(_SEARCH_STEPS):
            middle = (low + high) / 2
            added_s = self.experts_s * (self._touched(num_decode + middle) - before)
            low, high = (middle, high) if middle <= within(left_s - added_s) else (low, middle)
        return low

    def observe(
        self, num_prefill: int, num_decode: int, num_context: int, seconds: float, num_attended: int = 0
    ) -> None:
        if not self._learns:
            return
        amounts = self._amounts(num_prefill, num_decode, num_context, num_attended)
        if self.is_known:
            ratio = seconds / max(_seconds(self._fit, amounts), 1e-9)
            self.slowdown += _FOLLOWING * (min(max(ratio, 1 / _DISTURBANCE), _DISTURBANCE) - self.slowdown)
        self._add(amounts, seconds)
        self.num_steps += 1
        if self.num_steps % _REFIT_STEPS == 0 or self.num_steps == _ENOUGH_STEPS:
            self._refit()
        self.coefficients = [self.slowdown * coefficient for coefficient in self._fit]

    def _add(self, amounts: Sequence[float], seconds: float) -> None:
        """Adds a step to the sums that the fit is made of."""
        row = [amount / scale for amount, scale in zip(amounts, _SCALES, strict=False)]
        # Relative errors: a long step says no more than a short one, and one that was disturbed says little.
        weight = 1.0 / max(seconds, 1e-6) ** 2
        for i in self._all:
            self._moment[i] = _FADING * self._moment[i] + weight * row[i] * seconds
            gram = self._gram[i]
            for j in self._all:
                gram[j] = _FADING * gram[j] + weight * row[i] * row[j]

    def _amounts(
        self, num_prefill: float, num_decode: float, num_context: float, num_attended: float
    ) -> tuple[float, ...]:
        amounts = (1.0, num_prefill, num_decode, num_context, num_attended)
        return (*amounts, self._touched(num_prefill + num_decode)) if self.chosen_share else amounts

    def _touched(self, num_tokens: float) -> float:
        """The share of experts that some of the tokens are expected to choose, each of them at random."""
        return 1.0 - float((1.0 - self.chosen_share) ** num_tokens)

    def _refit(self) -> None:
        is_first = not any(self._fit)
        self._fit_around(self._fit)
        if (
            is_first
        ):  # until steps with more or fewer of them say otherwise, a decode takes what a prompt token does
            _, beta, *_ = self._fit
            self._fit_around([0.0, beta, beta, *self._fit[3:]])
        # Deep in a long prompt, nearly all of a step's time grows with the pairs, and noise says the rest: without a
        # time of their own, prompt tokens would have no measure.
        self._fit[1] = max(self._fit[1], self._fit[2] / _MOST_PROMPT_TOKENS)

    def _fit_around(self, estimate: Sequence[float]) -> None:
        centre = [c * scale for c, scale in zip(estimate, _SCALES, strict=False)]
        ridge = _RIDGE * self._gram[0][0] / 100.0
        free = list(self._all)
        while free:
            matrix = [[self._gram[i][j] + (ridge if i == j else 0.0) for j in free] for i in free]
            solution = _solve(matrix, [self._moment[i] + ridge * centre[i] for i in free])
            negative = [i for i, value in zip(free, solution, strict=True) if value < 0]
            if not negative:
                found = dict(zip(free, solution, strict=True))
                self._fit = [found.get(i, 0.0) / _SCALES[i] for i in self._all]
                return
            free = [i for i in free if i not in negative]


def _seconds(coefficients: Sequence[float], amounts: Sequence[float]) -> float:
    return sum([each * amount for each, amount in zip(coefficients, amounts, strict=True)])


def _solved(beta: float, epsilon: float, left_s: float) -> float:
    """Returns the x that solves beta * x + epsilon * x^2 / 2 = left_s, or less than 0 if there is nothing left."""
    if left_s <= 0:
        return left_s / (beta or epsilon)
    return 2 * left_s / (beta + sqrt(beta**2 + 2 * epsilon * left_s))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a positive definite system by Gaussian elimination, which uses up both arguments."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    for i in reversed(range(size)):
        known = sum(matrix[i][j] * right[j] for j in range(i + 1, size))
        right[i] = (right[i] - known) / matrix[i][i]
    return right
