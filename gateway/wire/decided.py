"""Answers to questions: what the log probabilities of labels come to, as OpenAI has it and as TypeSafe has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, fsum, log

from penstock.gateway.wire.frames import response_usage_of, timings_of
from penstock.gateway.wire.labels import LabelSteps
from penstock.gateway.wire.questions import Option, Question
from penstock.gateway.wire.writing import Outputs, Reply


class DecisionsWriter:
    """Makes answers of the log probabilities of tokens, as OpenAI has them."""

    def __init__(
        self, model: str, questions: Sequence[Question], steps: Sequence[Sequence[LabelSteps]]
    ) -> None:
        """`steps` are those of each question's labels."""
        self._model = model
        self._questions = questions
        self._steps = steps

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        scores = [delta.scores or [] for _, delta in outputs]
        answers = [
            (question, *probabilities_of(labels, scores))
            for question, labels in zip(self._questions, self._steps, strict=True)
        ]
        return {
            "model": self._model,
            "answers": self.answers(answers),
            "usage": response_usage_of(reply),
            "timings": timings_of(reply),
        }

    def answers(self, scored: Iterable[tuple[Question, list[float], float]]) -> object:
        """Writes the result: by question, the probabilities of its options, and their total mass."""
        return [
            {"type": question.kind, "name": question.name, **_decision(question, values), "label_mass": mass}
            for question, values, mass in scored
        ]


class SystemOneWriter(DecisionsWriter):
    """Answers as TypeSafe has them."""

    def answers(self, scored: Iterable[tuple[Question, list[float], float]]) -> object:
        return {
            question.name: {**_system_decision(question, values), "label_mass": mass}
            for question, values, mass in scored
        }


def _decision(question: Question, values: list[float]) -> dict[str, object]:
    pairs = list(zip(question.options, values, strict=True))
    if question.kind == "predicate":
        return {"probability": values[0]}
    if question.kind == "choice":
        return {
            "choice": _likeliest(question, values).value,
            "confidence": choice_confidence(values),
            "probabilities": [{"value": o.value, "probability": p} for o, p in pairs],
        }
    return {
        "score": expected_level(values),
        "confidence": score_confidence(values),
        "probabilities": [
            {"label": option.label, "value": level, "probability": value}
            for level, (option, value) in enumerate(pairs)
        ],
    }


def _system_decision(question: Question, values: list[float]) -> dict[str, object]:
    by_label = {option.label: value for option, value in zip(question.options, values, strict=True)}
    if question.kind == "predicate":
        return {"type": "noul", "noul": values[0]}
    if question.kind == "choice":
        choice, confidence = _likeliest(question, values).value, choice_confidence(values)
        return {"type": "choice", "choice": choice, "confidence": confidence, "probabilities": by_label}
    return {
        "type": "score",
        "score": expected_level(values),
        "legend": {option.label: option.description for option in question.options},
        "confidence": score_confidence(values),
        "probabilities": by_label,
    }


def _likeliest(question: Question, values: list[float]) -> Option:
    return question.options[values.index(max(values))]


def probabilities_of(
    labels: Sequence[LabelSteps], scores: Sequence[Sequence[float]]
) -> tuple[list[float], float]:
    """The probabilities of a question's labels, which add up to 1, and what they add up to among all texts.

    Args:
        scores: by branch, the log probabilities of its candidates.
    """
    logs = [
        fsum(_log_sum([scores[branch][place] for place in places]) for branch, places in steps)
        for steps in labels
    ]
    mass = _log_sum(logs)
    return [exp(each - mass) for each in logs], min(1.0, exp(mass))


def _log_sum(logs: Sequence[float]) -> float:
    """The logarithm of a sum of which the logarithms are given."""
    peak = max(logs)
    return peak + log(fsum(exp(each - peak) for each in logs))


def choice_confidence(values: Sequence[float]) -> float:
    """Returns how far the likeliest is above an even choice: 0 if all are alike, 1 if it is certain."""
    alike = 1 / len(values)
    return max(0.0, (max(values) - alike) / (1 - alike))


def score_confidence(values: Sequence[float]) -> float:
    """Returns how close the levels are to the likeliest: 1 if it is certain, 0 if as spread as an even choice."""
    best, middle = values.index(max(values)), (len(values) - 1) / 2
    distance = fsum(value * abs(level - best) for level, value in enumerate(values))
    alike = fsum(abs(level - middle) for level in range(len(values))) / len(values)
    return max(0.0, 1 - distance / alike)


def expected_level(values: Sequence[float]) -> float:
    return fsum(level * value for level, value in enumerate(values))
