"""Stop strings against `str.find`, with texts cut into tokens at every border, bytes of a character included."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.stop_strings import StopStrings, TextStream
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer
from tests.few import examples

TOKENIZER = Tokenizer(byte_level_tokenizer().to_str())
BYTES = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.special_ids}
"""Every single byte is a token of this vocabulary, so any text can be cut anywhere."""

ALPHABET = "ab .é日"
texts = st.text(alphabet=ALPHABET, max_size=30)
stops = st.text(alphabet=ALPHABET, min_size=1, max_size=5)
stop_tuples = st.lists(stops, min_size=1, max_size=4).map(tuple)


class Pieces:
    """A detokenizer whose token i is the i-th of these pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


@st.composite
def cut_texts(draw: st.DrawFn, text: st.SearchStrategy[str] = texts) -> list[str]:
    """A text as pieces, some of them empty."""
    whole = draw(text)
    borders = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[a:b] for a, b in pairwise([0, *borders, len(whole)])]


def show(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    """All that is shown of a text, and whether a stop string ended it."""
    stream = TextStream(Pieces(pieces), stops)
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        if stream.stopped:
            return shown, True
    return shown + stream.flush(), stream.stopped


def first_to_end(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string that ends first begins; of those that end together, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return None
    end, length = min(found)
    return end + length


@settings(max_examples=examples(30), deadline=None)
@given(cut_texts(), stop_tuples)
def test_a_stop_string_that_is_shown_is_the_end_of_the_text(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    hidden, is_stopped = show(pieces, stops)
    stream = TextStream(Pieces(pieces), stops, shows_stop=True)
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        if stream.stopped:
            break
    assert stream.stopped == is_stopped
    assert shown + stream.flush() == hidden + (stream.stop or "")


@settings(max_examples=examples(70), deadline=None)
@given(cut_texts(), stops)
def test_one_stop_string_is_found_where_find_finds_it(pieces: list[str], stop: str) -> None:
    text = "".join(pieces)
    at = text.find(stop)
    assert show(pieces, (stop,)) == ((text, False) if at < 0 else (text[:at], True))


@settings(max_examples=examples(70), deadline=None)
@given(cut_texts(), stop_tuples)
def test_of_several_the_first_to_end_wins(pieces: list[str], stops: tuple[str, ...]) -> None:
    text = "".join(pieces)
    at = first_to_end(text, stops)
    assert show(pieces, stops) == ((text, False) if at is None else (text[:at], True))


@settings(max_examples=examples(40), deadline=None)
@given(texts, stop_tuples, texts)
def test_where_the_borders_fall_changes_nothing(before: str, stops: tuple[str, ...], after: str) -> None:
    text = before + stops[0] + after
    whole = show([text], stops)
    assert whole[1]
    assert show(list(text), stops) == whole
    for border in range(len(text) + 1):
        assert show([text[:border], text[border:]], stops) == whole


@settings(max_examples=examples(40), deadline=None)
@given(cut_texts(), stop_tuples)
def test_exactly_what_could_still_become_a_stop_string_is_held_back(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    stream = TextStream(Pieces(pieces), stops)
    shown = text = ""
    for i, piece in enumerate(pieces):
        shown += stream.push(i)
        text += piece
        if stream.stopped:
            return
        starts = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert text == shown + text[len(text) - max(starts, default=0) :]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(cut_texts(), min_size=2, max_size=3), stop_tuples)
def test_streams_that_share_their_stop_strings_do_not_disturb_each_other(
    texts: list[list[str]], stops: tuple[str, ...]
) -> None:
    streams = [TextStream(Pieces(pieces), stops) for pieces in texts]
    shown = [""] * len(texts)
    for i in range(max(map(len, texts))):
        for number, (stream, pieces) in enumerate(zip(streams, texts, strict=True)):
            if i < len(pieces) and not stream.stopped:
                shown[number] += stream.push(i)
    for number, (stream, pieces) in enumerate(zip(streams, texts, strict=True)):
        rest = "" if stream.stopped else stream.flush()
        assert (shown[number] + rest, stream.stopped) == show(pieces, stops)


@settings(max_examples=examples(40), deadline=None)
@given(texts, stop_tuples)
def test_the_automaton_knows_the_longest_open_beginning_and_the_longest_match(
    text: str, stops: tuple[str, ...]
) -> None:
    automaton = StopStrings(stops)
    state = 0
    for end, character in enumerate(text, 1):
        state = automaton.step(state, character)
        seen = text[:end]
        opened = [n for stop in stops for n in range(1, len(stop) + 1) if seen.endswith(stop[:n])]
        assert automaton.depth[state] == max(opened, default=0)
        assert automaton.found[state] == max((len(s) for s in stops if seen.endswith(s)), default=0)


def test_a_match_inside_a_longer_one_that_breaks_off_is_found() -> None:
    assert show(list("abcd"), ("abcde", "bc")) == ("a", True)
    assert show(list("aab"), ("ab",)) == ("a", True)
    assert show(list("abababac"), ("abac",)) == ("abab", True)


# Through the sink, with real tokens


def tokens_of(text: str, cuts: list[int]) -> list[int]:
    """The text's bytes as tokens: cut where asked, further where no token has those bytes."""
    raw = text.encode()
    borders = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    tokens = []
    for start, end in pairwise(borders):
        part = raw[start:end]
        tokens += [BYTES[part]] if part in BYTES else [BYTES[bytes([byte])] for byte in part]
    return tokens


def run(token_ids: list[int], max_tokens: int, **params: object) -> tuple[str, FinishReason | None, int]:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    sequence = Sequence(Request(request_id="r", prompt_token_ids=(1,), sampling=sampling))
    sink = TextSink(TOKENIZER, ())
    text = ""
    for count, token_id in enumerate(token_ids, 1):
        sequence.token_ids.append(token_id)
        piece, reason = sink.accept(sequence, token_id, count == max_tokens)
        text += piece
        if reason is not None:
            return text, reason, count
    return text, None, len(token_ids)


cuts = st.lists(st.integers(0, 120), max_size=30)


@settings(max_examples=examples(70), deadline=None)
@given(texts.filter(bool), stop_tuples, cuts)
def test_a_sink_ends_a_text_before_its_stop_string_however_its_bytes_are_cut(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    token_ids = tokens_of(text, cuts)
    at = first_to_end(text, stops)
    shown, reason, _ = run(token_ids, len(token_ids), stop=stops)
    if at is None:
        assert (shown, reason) == (text, FinishReason.LENGTH)
    else:
        assert (shown, reason) == (text[:at], FinishReason.STOP)


@settings(max_examples=examples(40), deadline=None)
@given(texts, stops, cuts)
def test_a_sequence_ends_with_the_token_that_completes_the_stop_string(
    text: str, stop: str, cuts: list[int]
) -> None:
    token_ids = tokens_of(text + stop + text, cuts)
    _, reason, count = run(token_ids, len(token_ids), stop=(stop,))
    assert reason is FinishReason.STOP
    raw = [TOKENIZER.token_bytes(i) for i in token_ids]
    assert stop in b"".join(raw[:count]).decode("utf-8", "ignore")
    assert stop not in b"".join(raw[: count - 1]).decode("utf-8", "ignore")


@settings(max_examples=examples(40), deadline=None)
@given(texts.filter(bool), cuts, st.integers(1, 60))
def test_a_sequence_that_is_cut_off_shows_every_whole_character_of_its_tokens(
    text: str, cuts: list[int], most: int
) -> None:
    token_ids = tokens_of(text, cuts)
    most = min(most, len(token_ids))
    shown, reason, _ = run(token_ids, most, stop=("never\n",))
    raw = b"".join(TOKENIZER.token_bytes(i) for i in token_ids[:most])
    assert (shown, reason) == (raw.decode("utf-8", "replace"), FinishReason.LENGTH)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(0, 12))
def test_a_stop_token_counts_from_min_tokens_on(letters: list[str], min_tokens: int) -> None:
    stop = BYTES[b"b"]
    token_ids = [BYTES[letter.encode()] for letter in letters]
    _, reason, count = run(token_ids, 100, stop_token_ids=frozenset({stop}), min_tokens=min_tokens)
    due = [number for number, token in enumerate(token_ids, 1) if token == stop and number > min_tokens]
    assert (reason, count) == ((FinishReason.STOP, due[0]) if due else (None, len(token_ids)))
