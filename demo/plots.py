"""The plots: what may happen in a story, as templates for `grammar.fill`.

Slots: {name}, {hero} and {he him his himself}, {friend}, {fname} and {fhe fhim fhis}, {object}, {a_object},
{the_place}, {in_place} (first mention), {in_the_place}, {sights}. A capital first letter gives a capital.
A sentence that starts with `?` is told only now and then.
"""

from dataclasses import dataclass

from demo.grammar import phrases


@dataclass(frozen=True)
class Plot:
    topics: tuple[str, ...]  # what one may ask for: "a story about friendship"
    trouble: tuple[str, ...]
    search: tuple[str, ...]
    help: tuple[str, ...]  # the friend comes in here and stays
    outcome: tuple[str, ...]
    summary: tuple[str, str]  # after "who and where": what went wrong, how it ended
    lesson: str
    title: str
    uses_object: bool = False


PLOTS = [Plot(**each) for each in phrases("plots")]
