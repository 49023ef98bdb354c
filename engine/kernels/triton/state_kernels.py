"""Layers with a state in Triton: one row of a sequence after another, and the slots that keep rows.

Rows of a sequence have numbers: 0 is its first row in the step. Earlier rows have negative numbers: the replayed rows,
and before these the history, both of the slot that the sequence reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_saves", "most_rows"])
def state_kernel(
    made: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    gates: tl.tensor,
    gate_stride: tl.tensor,
    conv: tl.tensor,
    conv_bias: tl.tensor,
    decay: tl.tensor,
    step_bias: tl.tensor,
    skip: tl.tensor,
    state: tl.tensor,
    history: tl.tensor,
    pending: tl.tensor,
    slot_stride: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    saves: tl.tensor,
    num_saves: tl.tensor,
    most_rows: tl.tensor,
    least_step: tl.tensor,
    most_step: tl.tensor,
    query_scale: tl.tensor,
    unit_eps: tl.tensor,
    IS_DELTA: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    IS_TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    SAVES: tl.constexpr,
) -> None:
    """Takes some columns of the state of one head through the rows of one sequence; no other program has these.

    Args:
        made: [T, NUM_HEADS * VALUE_DIM] float32, before the norm.
        rows: the inputs of the convolution; queries, keys and values begin where the constants say.
        gates: b and a of all heads of a gated delta net; d of Mamba-2.
        state, history, pending: of slot 0. They are None, as `slots`, if all sequences begin and nothing is kept.
        most_rows: sequences with more are left to others.
    """
    sequence = tl.program_id(1)
    start = tl.load(query_starts + sequence).to(tl.int64)
    num_rows = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    if num_rows > most_rows:
        return
    NUM_BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_VALUES - 1) // BLOCK_VALUES
    head = tl.program_id(0) // NUM_BLOCKS
    key_head = head % NUM_KEY_HEADS if IS_TILED else head // (NUM_HEADS // NUM_KEY_HEADS)
    keys = tl.arange(0, BLOCK_KEYS)
    values = tl.program_id(0) % NUM_BLOCKS * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key = keys < KEY_DIM
    is_value = values < VALUE_DIM
    of_q = QUERIES + key_head * KEY_DIM + keys
    of_k = KEYS + key_head * KEY_DIM + keys
    of_v = VALUES + head * VALUE_DIM + values
    q_taps = _taps(of_q, is_key, conv, KERNEL, TAPS)
    k_taps = _taps(of_k, is_key, conv, KERNEL, TAPS)
    v_taps = _taps(of_v, is_value, conv, KERNEL, TAPS)
    head_decay = tl.load(decay + head)
    head_bias = tl.load(step_bias + head)

    rows += start * row_stride
    places = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    if slots is None:
        replayed = num_rows * 0
        certain = num_rows
        matrix = tl.zeros([BLOCK_KEYS, BLOCK_VALUES], tl.float32)
    else:
        source = tl.load(slots + 4 * sequence).to(tl.int64) * slot_stride
        replayed = tl.load(slots + 4 * sequence + 2)
        certain = tl.load(slots + 4 * sequence + 3)
        matrix = tl.load(state + source + places, mask=inside, other=0.0)
        history += source
        pending += source

    begin = -replayed
    done = num_rows * 0 - 1
    while done < num_rows:
        saved = next_save(saves, num_saves, sequence, done, SAVES)
        done = tl.minimum(saved, tl.where(certain > done, certain, num_rows))
        for number in range(begin, done):
            row = start + number
            given = rows, None, row_stride, history, pending, replayed
            k = _convolved(number, of_k, is_key, k_taps, conv_bias, given, CHANNELS, ROW_FLOATS, KERNEL, TAPS)
            v = _convolved(
                number, of_v, is_value, v_taps, conv_bias, given, CHANNELS, ROW_FLOATS, KERNEL, TAPS
            )
            q = _convolved(number, of_q, is_key, q_taps, conv_bias, given, CHANNELS, ROW_FLOATS, KERNEL, TAPS)
            gate = _gate(row, start, head, gates, gate_stride, pending, replayed, CHANNELS, ROW_FLOATS)
            if IS_DELTA:
                a = _gate(
                    row, start, NUM_HEADS + head, gates, gate_stride, pending, replayed, CHANNELS, ROW_FLOATS
                )
                q *= tl.rsqrt(tl.sum(q * q) + unit_eps) * query_scale
                k *= tl.rsqrt(tl.sum(k * k) + unit_eps)
                matrix *= tl.exp(head_decay * softplus(a + head_bias))
                found = tl.sum(matrix * k[:, None], 0)
                matrix += k[:, None] * ((v - found) / (1.0 + tl.exp(-gate)))[None, :]
                out = tl.sum(matrix * q[:, None], 0)
            else:
                step = tl.minimum(tl.maximum(softplus(gate + head_bias), least_step), most_step)
                matrix *= tl.exp(head_decay * step)
                matrix += (step * k)[:, None] * v[None, :]
                out = tl.sum(matrix * q[:, None], 0) + tl.load(skip + head) * v
            if number >= 0:
                tl.store(made + row * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + values, out, mask=is_value)
        begin = tl.maximum(begin, done)
        if slots is not None:
            if done == certain:
                slot = tl.load(slots + 4 * sequence + 1)
                if slot > 0:
                    tl.store(state + slot.to(tl.int64) * slot_stride + places, matrix, mask=inside)
            if done == saved:
                for save in range(0, num_saves):
                    if tl.load(saves + 4 * save) == sequence:
                        slot = tl.load(saves + 4 * save + 2)
                        if (tl.load(saves + 4 * save + 1) == done) & (slot > 0):
                            tl.store(state + slot.to(tl.int64) * slot_stride + places, matrix, mask=inside)


@triton.jit(do_not_specialize=["num_saves"])
def keep_rows_kernel(
    rows: tl.tensor,
    row_stride: tl.tensor,
    gates: tl.tensor,
    gate_stride: tl.tensor,
    history: tl.tensor,
    pending: tl.tensor,
    slot_stride: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    saves: tl.tensor,
    num_saves: tl.tensor,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Keeps some columns of the rows of one sequence, once their state is made."""
    sequence = tl.program_id(1)
    start = tl.load(query_starts + sequence).to(tl.int64)
    num_rows = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows += start * row_stride
    gates += start * gate_stride
    source = tl.load(slots + 4 * sequence).to(tl.int64) * slot_stride
    replayed = tl.load(slots + 4 * sequence + 2)
    given = rows, None, row_stride, history + source, pending + source, replayed
    kept = gates, gate_stride, history, pending, slot_stride
    _keep_rows(
        sequence, num_rows, columns, given, kept, slots, saves, num_saves, CHANNELS, ROW_FLOATS, KERNEL, TAPS
    )


@triton.jit(do_not_specialize=["num_saves", "num_tokens", "num_sequences"])
def short_conv_kernel(
    made: tl.tensor,
    rows: tl.tensor,
    conv: tl.tensor,
    conv_bias: tl.tensor,
    history: tl.tensor,
    pending: tl.tensor,
    slot_stride: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    saves: tl.tensor,
    num_saves: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes some channels of tiles of ROWS rows of one sequence, and keeps its rows; one more sequence has no rows.

    Args:
        made: [T, CHANNELS] zeros in rows of no sequence.
        rows: [T, 3 CHANNELS], whose first and last third are multiplied before the convolution.
    """
    sequence = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    start = tl.load(query_starts + sequence).to(tl.int64)
    rows += start * 3 * CHANNELS
    made += start * CHANNELS
    first_row = tl.program_id(2) * ROWS
    rows_a_round = tl.num_programs(2) * ROWS
    if sequence == num_sequences:
        for first in range(first_row, (num_tokens - start).to(tl.int32), rows_a_round):
            numbers = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            mask = inside[None, :] & (start + numbers < num_tokens)
            tl.store(made + numbers * CHANNELS + columns[None, :], 0.0, mask=mask)
        return
    num_rows = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    if slots is None:
        given = rows, rows + 2 * CHANNELS, 3 * CHANNELS, None, None, 0
    else:
        source = tl.load(slots + 4 * sequence).to(tl.int64) * slot_stride
        replayed = tl.load(slots + 4 * sequence + 2)
        given = rows, rows + 2 * CHANNELS, 3 * CHANNELS, history + source, pending + source, replayed
    for first in range(first_row, num_rows, rows_a_round):
        numbers = first + tl.arange(0, ROWS)[:, None]
        mask = inside[None, :] & (numbers < num_rows)
        out = tl.zeros([ROWS, BLOCK], tl.float32)
        if conv_bias is not None:
            out += tl.load(conv_bias + columns, mask=inside, other=0.0)[None, :]
        for tap in tl.static_range(KERNEL):
            taps = tl.load(conv + columns * KERNEL + tap, mask=inside, other=0.0)
            found = inputs_of(
                numbers + (tap - KERNEL + 1), columns[None, :], mask, given, CHANNELS, CHANNELS, KERNEL
            )
            out += found * taps[None, :]
        places = numbers.to(tl.int64) * CHANNELS + columns[None, :]
        behind = rows + numbers.to(tl.int64) * 3 * CHANNELS + CHANNELS + columns[None, :]
        out *= tl.load(behind, mask=mask, other=0.0).to(tl.float32)
        tl.store(made + places, out.to(made.dtype.element_ty), mask=mask)
    if slots is not None:  # noqa: SIM102 (known to the compiler; the other is not)
        # The first tile is the only one that reads slots: others begin further on than the kernel reaches.
        if first_row == 0:
            tl.debug_barrier()
            kept = None, 0, history, pending, slot_stride
            _keep_rows(
                sequence,
                num_rows,
                columns,
                given,
                kept,
                slots,
                saves,
                num_saves,
                CHANNELS,
                CHANNELS,
                KERNEL,
                TAPS,
            )


@triton.jit
def _keep_rows(
    sequence: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    given: tl.tuple,
    kept: tl.tuple,
    slots: tl.tensor,
    saves: tl.tensor,
    num_saves: tl.tensor,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """Writes some columns of the history and of the pending rows to the slots that want them.

    The target comes last, since it may be the source, too; no other program has these columns of it.
    """
    for save in range(0, num_saves):
        if tl.load(saves + 4 * save) == sequence:
            done = tl.load(saves + 4 * save + 1)
            slot = tl.load(saves + 4 * save + 2)
            num_kept = tl.load(saves + 4 * save + 3)
            _write_rows(slot, done, num_kept, columns, given, kept, CHANNELS, ROW_FLOATS, KERNEL, TAPS)
    slot = tl.load(slots + 4 * sequence + 1)
    done = tl.load(slots + 4 * sequence + 3)
    _write_rows(slot, done, num_rows - done, columns, given, kept, CHANNELS, ROW_FLOATS, KERNEL, TAPS)


@triton.jit
def _write_rows(
    slot: tl.tensor,
    done: tl.tensor,
    num_kept: tl.tensor,
    columns: tl.tensor,
    given: tl.tuple,
    kept: tl.tuple,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """Writes the history after `done` rows, and the rows that follow, to a slot; to none if it is 0."""
    gates, gate_stride, history, pending, slot_stride = kept
    offset = slot.to(tl.int64) * slot_stride
    is_channel = columns < CHANNELS
    if slot > 0:
        places = tl.arange(0, TAPS)[:, None]
        mask = is_channel[None, :] & (places < KERNEL - 1)
        before = done - (KERNEL - 1) + places
        rows = inputs_of(before, columns[None, :], mask, given, CHANNELS, ROW_FLOATS, KERNEL)
        tl.debug_barrier()  # every thread has read by now the memory that others may write
        tl.store(history + offset + places * CHANNELS + columns[None, :], rows, mask=mask)
        for number in range(0, num_kept):
            numbers = tl.zeros_like(columns) + done + number
            row = inputs_of(numbers, columns, is_channel, given, CHANNELS, ROW_FLOATS, KERNEL)
            if gates is not None:
                of_gates = gates + numbers.to(tl.int64) * gate_stride + columns - CHANNELS
                is_gate = (columns >= CHANNELS) & (columns < ROW_FLOATS)
                row += tl.load(of_gates, mask=is_gate, other=0.0).to(tl.float32)
            tl.store(pending + offset + number * ROW_FLOATS + columns, row, mask=columns < ROW_FLOATS)


@triton.jit
def inputs_of(
    numbers: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    given: tl.tuple,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
) -> tl.tensor:
    """The inputs of the convolution in rows of these numbers, in float32; zeros before the first of all.

    Args:
        given: row 0 of the sequence and its factor, if any; the distance of rows; the history and the pending rows of
            the slot that is read, if there are any, and the number of replayed rows.
    """
    rows, factors, stride, history, pending, replayed = given
    is_new = mask & (numbers >= 0)
    places = numbers.to(tl.int64) * stride + columns
    found = tl.load(rows + places, mask=is_new, other=0.0).to(tl.float32)
    if factors is not None:
        found *= tl.load(factors + places, mask=is_new, other=0.0).to(tl.float32)
    if history is not None:
        again = numbers + replayed
        is_replayed = mask & (numbers < 0) & (again >= 0)
        found += tl.load(pending + again * ROW_FLOATS + columns, mask=is_replayed, other=0.0)
        is_before = mask & (again < 0)
        found += tl.load(history + (again + KERNEL - 1) * CHANNELS + columns, mask=is_before, other=0.0)
    return found


@triton.jit
def _taps(
    columns: tl.tensor, inside: tl.tensor, conv: tl.tensor, KERNEL: tl.constexpr, TAPS: tl.constexpr
) -> tl.tensor:
    """Returns [TAPS, columns], the weights of the convolution, the row's own last, and then zeros."""
    taps = tl.arange(0, TAPS)[:, None]
    return tl.load(conv + columns[None, :] * KERNEL + taps, mask=inside[None, :] & (taps < KERNEL), other=0.0)


@triton.jit
def _convolved(
    number: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    weights: tl.tensor,
    conv_bias: tl.tensor,
    given: tl.tuple,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Returns the convolution and SiLU of one row."""
    taps = tl.arange(0, TAPS)[:, None]
    numbers = number - (KERNEL - 1) + taps
    mask = inside[None, :] & (taps < KERNEL)
    found = inputs_of(numbers, columns[None, :], mask, given, CHANNELS, ROW_FLOATS, KERNEL)
    x = tl.sum(weights * found, 0)
    if conv_bias is not None:
        x += tl.load(conv_bias + columns, mask=inside, other=0.0)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gate(
    row: tl.tensor,
    start: tl.tensor,
    column: tl.tensor,
    gates: tl.tensor,
    stride: tl.tensor,
    pending: tl.tensor,
    replayed: tl.tensor,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
) -> tl.tensor:
    """A gate of the row of the step, or of the one that is replayed so many rows before `start`."""
    found = tl.load(gates + row * stride + column, mask=row >= start, other=0.0).to(tl.float32)
    if pending is not None:
        place = pending + (row - start + replayed) * ROW_FLOATS + CHANNELS + column
        found += tl.load(place, mask=row < start, other=0.0)
    return found


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), also where 1 + exp(x) is rounded: the rounding error is divided out (Goldberg, 1991)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    counted = total - 1.0
    is_lost = counted == 0.0
    made = tl.log(total) * (grown / tl.where(is_lost, 1.0, counted))
    return tl.where(x > 20.0, x, tl.where(is_lost, grown, made))


@triton.jit
def next_save(
    saves: tl.tensor, num_saves: tl.tensor, sequence: tl.tensor, done: tl.tensor, SAVES: tl.constexpr
) -> tl.tensor:
    """The fewest rows, more than `done`, after which the state of the sequence is saved."""
    found = tl.full((), NEVER, tl.int32)
    for first in range(0, num_saves, SAVES):
        numbers = first + tl.arange(0, SAVES)
        inside = numbers < num_saves
        is_own = tl.load(saves + 4 * numbers, mask=inside, other=-1) == sequence
        rows = tl.load(saves + 4 * numbers + 1, mask=inside, other=0)
        found = tl.minimum(found, tl.min(tl.where(is_own & (rows > done), rows, NEVER)))
    return found
