from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.detokenizer import make_detokenizer
from penstock.engine.text.stop_strings import StopStrings, TextStream
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer().to_str())
END = TOKENIZER.id_of("<|end|>")
assert END is not None

letters = st.text(alphabet="abc é", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), max_size=3)


def stream(stops: list[str]) -> TextStream:
    return TextStream(make_detokenizer(TOKENIZER), tuple(stops))


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the first stop string to end begins; of those that end together, the longest."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


@given(letters, stop_lists)
def test_the_text_shown_ends_just_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    watched = stream(stops)
    shown = ""
    fed = b""
    for token_id in TOKENIZER.encode(text):
        shown += watched.push(token_id)
        fed += TOKENIZER.token_bytes(token_id)
        if watched.stopped:
            break
    else:
        shown += watched.flush()
    seen = fed.decode("utf-8", "ignore")
    at = first_stop(seen, stops)
    assert watched.stopped == (at is not None)
    assert shown == (seen if at is None else seen[:at])


@given(letters, stop_lists)
def test_what_could_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    watched = stream(stops)
    shown, fed = "", b""
    for token_id in TOKENIZER.encode(text):
        shown += watched.push(token_id)
        if watched.stopped:
            break
        fed += TOKENIZER.token_bytes(token_id)
        seen = fed.decode("utf-8", "ignore")
        open_starts = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert len(shown) <= len(seen) - max(open_starts, default=0)


def run(tokens: list[int], **params: object) -> tuple[str, FinishReason | None, int]:
    """Feeds output tokens to a sink as the scheduler does: the text, why it ended, and after how many tokens."""
    sampling = SamplingParams(**{"max_tokens": 100, **params})  # type: ignore[arg-type]
    sequence = Sequence(Request(request_id="r", prompt_token_ids=(1,), sampling=sampling))
    sink = TextSink(TOKENIZER, (END,) if END is not None else ())
    text = ""
    for count, token_id in enumerate(tokens, 1):
        sequence.token_ids.append(token_id)
        piece, reason = sink.accept(sequence, token_id, count >= sampling.max_tokens)
        text += piece
        if reason is not None:
            return text, reason, count
    return text, None, len(tokens)


HELLO = TOKENIZER.encode("the river turns")


def test_end_of_sequence_ends_without_a_text_of_its_own() -> None:
    assert run([*HELLO, END or 0, *HELLO])[:2] == ("the river turns", FinishReason.STOP)


def test_ignore_eos_goes_on() -> None:
    assert run([*HELLO, END or 0, *HELLO], ignore_eos=True)[:2] == ("the river turnsthe river turns", None)


def test_a_stop_token_ends_even_when_eos_is_ignored() -> None:
    stop = HELLO[1]
    text, reason, count = run(HELLO, stop_token_ids=frozenset({stop}), ignore_eos=True)
    assert (reason, count) == (FinishReason.STOP, 2)
    assert text == TOKENIZER.decode(HELLO[:1])


def test_length_shows_what_was_held_back() -> None:
    text, reason, count = run(HELLO, max_tokens=len(HELLO), stop=("turns the",))
    assert (text, reason, count) == ("the river turns", FinishReason.LENGTH, len(HELLO))


def test_a_stop_string_that_ends_with_the_last_token_is_a_stop() -> None:
    assert run(HELLO, max_tokens=len(HELLO), stop=(" turns",))[:2] == ("the river", FinishReason.STOP)


def test_a_sequence_knows_the_string_that_ended_it() -> None:
    sampling = SamplingParams(max_tokens=len(HELLO), stop=("nothing", "urns", "turns"))
    sequence = Sequence(Request(request_id="r", prompt_token_ids=(1,), sampling=sampling))
    sink = TextSink(TOKENIZER, ())
    for count, token_id in enumerate(HELLO, 1):
        sequence.token_ids.append(token_id)
        sink.accept(sequence, token_id, count == len(HELLO))
    assert sequence.stop == "turns"


def test_no_stop_before_min_tokens() -> None:
    tokens = TOKENIZER.encode("a b a b a b")
    assert run(tokens, stop=("a",), min_tokens=3)[0].startswith(TOKENIZER.decode(tokens[:2]))
    assert run([END or 0, *HELLO, END or 0], min_tokens=2)[:2] == ("the river turns", FinishReason.STOP)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    tokens = TOKENIZER.encode("日")[:1]
    assert run(tokens, max_tokens=1)[0] in ("\ufffd", "日")


def test_a_stop_string_before_min_tokens_is_text_and_one_across_it_is_not_shown() -> None:
    tokens = [TOKENIZER.encode(letter)[0] for letter in "axbxcxd"]
    assert run(tokens, stop=("x",), min_tokens=3)[:2] == ("axb", FinishReason.STOP)
    assert run(tokens, stop=("xbx",), min_tokens=3)[:2] == ("a", FinishReason.STOP)
    assert run(tokens, stop=("xc",), min_tokens=5)[:2] == ("axb", FinishReason.STOP)
    assert run(tokens, stop=("xc",), min_tokens=6)[:2] == ("axbxcxd", None)


def test_the_first_to_end_wins_and_then_the_longest() -> None:
    tokens = TOKENIZER.encode("abcde")
    assert run(tokens, stop=("abcd", "bc"))[0] == "a"
    assert run(tokens, stop=("c", "bc", "abc"))[0] == ""
    assert run(tokens, stop=("bcd", "cd"))[0] == "a"


def test_an_empty_stop_string_stops_nothing() -> None:
    assert run(HELLO, stop=("",))[:2] == ("the river turns", None)
    assert run(HELLO, stop=("", "turns"))[:2] == ("the river ", FinishReason.STOP)


def test_long_stop_strings_cost_no_more_per_character_than_short_ones() -> None:
    """Each character is looked up once, and once more for each step back that earlier ones have paid for."""
    stops = StopStrings(("a" * 5000 + "b", "a" * 4000 + "c"))
    looked_up = 0

    class Counting(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal looked_up
            looked_up += 1
            return super().__contains__(key)

    stops._next = [Counting(following) for following in stops._next]
    state = 0
    for character in ("a" * 4999 + "d") * 4:
        state = stops.step(state, character)
    assert looked_up < 3 * 20_000
