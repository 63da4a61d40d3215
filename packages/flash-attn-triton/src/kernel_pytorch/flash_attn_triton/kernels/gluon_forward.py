"""The forward pass in Gluon for Hopper (compute capability 9.0): what plain attention and causal attention take there.

The warps of a program have different work. One warp, the producer, only asks the copy engine (TMA) for tiles: queries,
and keys and values into rings of STAGES tiles. Two or three groups of four warps, the consumers, attend for ROWS
queries each. Barriers in shared memory say which tile has arrived (full) and which has been read (empty).

A consumer never lets the tensor cores wait for a softmax: with the scores of tile i in registers it starts the product
of its queries with the keys of tile i + 1, and that of the weights of tile i with its values, and while these run it
computes the softmax of tile i + 1 as soon as its scores are there:

    start  s[i+1] = q k[i+1]^T
    start  acc += p[i] v[i]
    wait for s[i+1]:  top, p[i+1], total
    wait for acc:     scale it to the new top

Keys are walked from the last to the first, because those that a query may not see, for causal or because there are no
more, come last: the first tiles of the walk get a mask, the others skip it. The copy engine reads zeros beyond the last
row of q, k and v, and writes nothing beyond the last row of o.

A program takes items, an item being ROWS * CONSUMERS queries of one head, until there are none: while consumers write
one item the producer fetches the next. `_item_at` orders them.

Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608, section 3: warps of different work, and the two
products under way at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a consumer: what a matrix instruction of four warps takes

# Triton 3.8 renamed both.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_write = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _items_of(items):
    """How many of the items this program takes."""
    programs = gl.num_programs(0)
    waves = items // programs
    place = gl.program_id(0)
    if waves % 2 == 1:
        place = programs - 1 - place
    return waves + (place < items - waves * programs).to(gl.int32)


@gluon.jit
def _item_at(
    wave, heads, group, rows, columns, heads_of_batches,
    CAUSAL: gl.constexpr, TOGETHER: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The item that this program takes in a wave: batch, head, key head, first query, and how many tiles of keys.

    TOGETHER heads are worked on at a time, so that their keys and values stay in the L2 cache. Where it is causal, the
    items of these with most to do come first, and every other wave is dealt out backwards.
    """
    place = gl.program_id(0)
    if wave % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    item = wave * gl.num_programs(0) + place
    of_head = gl.cdiv(rows, ROWS * CONSUMERS)
    first_head = item // (TOGETHER * of_head) * TOGETHER
    present = gl.minimum(TOGETHER, heads_of_batches - first_head)
    within = item % (TOGETHER * of_head)
    head_of_batch = first_head + within % present
    tile = within // present
    if CAUSAL:
        tile = of_head - 1 - tile
    first = tile * (ROWS * CONSUMERS)
    end = columns
    if CAUSAL:
        last = gl.minimum(first + ROWS * CONSUMERS, rows) - 1
        end = gl.minimum(columns, last + columns - rows + 1)
    tiles = gl.maximum(gl.cdiv(end, COLUMNS), 1)  # queries that see nothing visit a tile that is masked as a whole
    batch = head_of_batch // heads
    head = head_of_batch % heads
    return batch, head, head // group, head_of_batch, first, tiles


@gluon.jit
def _matrix(tiles, index):
    """One of the tiles, (1, 1, rows, depth), as a matrix."""
    return tiles.index(index).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, barriers, work,
    CAUSAL: gl.constexpr, TOGETHER: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch what the consumers read, in the order in which they read it."""
    heads, group, rows, columns, heads_of_batches, items = work
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    fetched = 0  # tiles of keys
    for wave in range(_items_of(items)):
        batch, head, kv_head, _, first, tiles = _item_at(
            wave, heads, group, rows, columns, heads_of_batches, CAUSAL, TOGETHER, CONSUMERS, COLUMNS
        )
        for consumer in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(consumer), (wave & 1) ^ 1)
            mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
            _fetch(q_desc, [batch, head, first + consumer * ROWS, 0], q_full.index(consumer), q_tiles.index(consumer))
        for i in range(tiles):
            column = (tiles - 1 - i) * COLUMNS
            slot = fetched % STAGES
            unread = ((fetched // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), unread)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            _fetch(k_desc, [batch, kv_head, column, 0], k_full.index(slot), k_tiles.index(slot))
            mbarrier.wait(v_empty.index(slot), unread)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            _fetch(v_desc, [batch, kv_head, column, 0], v_full.index(slot), v_tiles.index(slot))
            fetched += 1


@gluon.jit
def _without_unseen(s, column, limit):
    """Products of which those with keys that a query does not see are -inf."""
    index = column + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(index[None, :] <= limit[:, None], s, float("-inf"))


@gluon.jit
def _partial_sums(p):
    """Sums of every eighth weight of a query, which one thread has; they are added up when all keys have been seen."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def _softmax(s, top, total, SCALE: gl.constexpr, CAUSAL: gl.constexpr):
    """Weights of a tile of products, the new maximum and partial sums of each query, and by what its output shrinks."""
    new_top = gl.maximum(top, gl.max(s, 1) * (SCALE * LOG2E))
    base = new_top
    if CAUSAL:
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf minus -inf is NaN
    p = gl.exp2(s * (SCALE * LOG2E) - base[:, None])
    shrink = gl.exp2(top - base)
    return (
        p,
        new_top,
        total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + _partial_sums(p),
        shrink,
    )


@gluon.jit
def _hold(total):
    """Let what comes after begin when these sums are there: a warp waits for itself, if none of them is negative.

    The assembler (ptxas) does not know what a wait waits for, and would move it in front of the softmax.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .f32 least;
        .reg .b32 warp;
        min.f32 least, $2, $3;
        setp.lt.f32 never, least, 0f00000000;
        selp.b32 warp, 1, -1, never;
        bar.warp.sync warp;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        }""",
        "=f,=f,f,f", [total], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _steps(
    acc, weights, top, total, read, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, limit, tiles, masked,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, OUTPUT: gl.constexpr, WEIGHTS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Walk the tiles of keys but the first, of which the weights are given; the next to last product is left over."""
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    for j in range(1, tiles):
        here = (read + j) % STAGES
        before = (read + j - 1) % STAGES
        mbarrier.wait(k_full.index(here), ((read + j) // STAGES) & 1)
        scores = warpgroup_mma(q, _matrix(k_tiles, here).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((read + j - 1) // STAGES) & 1)
        product = warpgroup_mma(weights, _matrix(v_tiles, before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(here), count=1)
        if CAUSAL:  # noqa: SIM102 - it decides whether there is a branch
            if j < masked:
                s = _without_unseen(s, (tiles - 1 - j) * COLUMNS, limit)
        p, top, total, shrink = _softmax(s, top, total, SCALE, CAUSAL)
        if HELD:
            total = _hold(total)
        acc = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
        weights = gl.convert_layout(p.to(q.dtype), WEIGHTS)
    return acc, weights, top, total


@gluon.jit
def _consume(
    o_desc, rest_desc, lse_ptr, normalizer_ptr, q_tiles, k_tiles, v_tiles, o_tiles, barriers, work,
    CONSUMER: gl.constexpr, SCALE: gl.constexpr, CAUSAL: gl.constexpr, KEEP_REST: gl.constexpr,
    TOGETHER: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """Attend for ROWS queries of each item."""
    heads, group, rows, columns, heads_of_batches, items = work
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DEPTH, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    q = _matrix(q_tiles, CONSUMER)
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    read = 0  # tiles of keys
    for wave in range(_items_of(items)):
        batch, head, _, head_of_batch, first, tiles = _item_at(
            wave, heads, group, rows, columns, heads_of_batches, CAUSAL, TOGETHER, CONSUMERS, COLUMNS
        )
        first += CONSUMER * ROWS
        row = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        # The last key that a query sees, how many tiles all queries here see as a whole, and how many need a mask.
        limit = gl.full([ROWS], columns - 1, gl.int32, gl.SliceLayout(1, SCORES))
        whole = columns // COLUMNS
        if CAUSAL:
            limit = gl.minimum(limit, row + (columns - rows))
            whole = gl.minimum(columns, gl.maximum(first + columns - rows + 1, 0)) // COLUMNS
        masked = tiles - whole

        mbarrier.wait(q_full.index(CONSUMER), wave & 1)
        slot = read % STAGES
        mbarrier.wait(k_full.index(slot), (read // STAGES) & 1)
        scores = warpgroup_mma(q, _matrix(k_tiles, slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = _partial_sums(gl.zeros([ROWS, COLUMNS], gl.float32, SCORES))
        if masked > 0:
            s = _without_unseen(s, (tiles - 1) * COLUMNS, limit)
        p, top, total, _ = _softmax(s, top, total, SCALE, CAUSAL)
        weights = gl.convert_layout(p.to(q.dtype), WEIGHTS)
        acc = gl.zeros([ROWS, DEPTH], gl.float32, OUTPUT)
        acc, weights, top, total = _steps(
            acc, weights, top, total, read, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, limit, tiles, masked,
            SCALE, CAUSAL, COLUMNS, STAGES, SCORES, OUTPUT, WEIGHTS, HELD,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(CONSUMER), count=1)

        read += tiles
        slot = (read - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((read - 1) // STAGES) & 1)
        product = warpgroup_mma(weights, _matrix(v_tiles, slot), acc, is_async=True)
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
        saw_nothing = total == 0.0
        total = gl.where(saw_nothing, 1.0, total)
        lse = gl.where(saw_nothing, float("-inf"), (top + gl.log2(total)) * LN2)
        first_of_head = head_of_batch.to(gl.int64) * rows
        gl.store(lse_ptr + first_of_head + row, lse, mask=row < rows)
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUTPUT))
        acc = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(v_empty.index(slot), count=1)
        acc = acc * inverse[:, None]
        o = acc.to(q.dtype)
        tma.store_wait(0)  # of the item before
        _matrix(o_tiles, CONSUMER).store(o)
        fence_async_shared()
        _write(o_desc, [batch, head, first, 0], o_tiles.index(CONSUMER))
        if KEEP_REST:
            tma.store_wait(0)
            _matrix(o_tiles, CONSUMER).store((acc - o.to(gl.float32)).to(q.dtype))
            fence_async_shared()
            _write(rest_desc, [batch, head, first, 0], o_tiles.index(CONSUMER))
            gl.store(normalizer_ptr + 2 * first_of_head + 2 * row, top, mask=row < rows)
            gl.store(normalizer_ptr + 2 * first_of_head + 2 * row + 1, total, mask=row < rows)
    tma.store_wait(0)


@gluon.jit
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, rest_desc, lse_ptr, normalizer_ptr,
    heads, group, rows, columns, heads_of_batches, items,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, KEEP_REST: gl.constexpr, TOGETHER: gl.constexpr,
    CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """This program attends for items; see the top of this file.

    q, o, rest: (B, H, Sq, DEPTH) in tiles of (1, 1, ROWS, DEPTH). k, v: (B, Hkv, Sk, DEPTH) in tiles of
    (1, 1, COLUMNS, DEPTH). lse: (B, H, Sq), and normalizer (B, H, Sq, 2), contiguous. SCALE is positive.
    """
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, DEPTH], q_desc.layout)
    o_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, DEPTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, COLUMNS, DEPTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, COLUMNS, DEPTH], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(consumer), count=1)
        mbarrier.init(q_empty.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    work = heads, group, rows, columns, heads_of_batches, items
    barriers = q_full, q_empty, k_full, k_empty, v_full, v_empty
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (o_desc, rest_desc, lse_ptr, normalizer_ptr, q_tiles, k_tiles, v_tiles, o_tiles, barriers,
                 work, 0, SCALE, CAUSAL, KEEP_REST, TOGETHER, CONSUMERS, COLUMNS, DEPTH, STAGES, HELD)),
                (_consume, (o_desc, rest_desc, lse_ptr, normalizer_ptr, q_tiles, k_tiles, v_tiles, o_tiles, barriers,
                 work, 1, SCALE, CAUSAL, KEEP_REST, TOGETHER, CONSUMERS, COLUMNS, DEPTH, STAGES, HELD)),
                (_produce, (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, barriers, work,
                 CAUSAL, TOGETHER, CONSUMERS, COLUMNS, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (o_desc, rest_desc, lse_ptr, normalizer_ptr, q_tiles, k_tiles, v_tiles, o_tiles, barriers,
                 work, 0, SCALE, CAUSAL, KEEP_REST, TOGETHER, CONSUMERS, COLUMNS, DEPTH, STAGES, HELD)),
                (_consume, (o_desc, rest_desc, lse_ptr, normalizer_ptr, q_tiles, k_tiles, v_tiles, o_tiles, barriers,
                 work, 1, SCALE, CAUSAL, KEEP_REST, TOGETHER, CONSUMERS, COLUMNS, DEPTH, STAGES, HELD)),
                (_consume, (o_desc, rest_desc, lse_ptr, normalizer_ptr, q_tiles, k_tiles, v_tiles, o_tiles, barriers,
                 work, 2, SCALE, CAUSAL, KEEP_REST, TOGETHER, CONSUMERS, COLUMNS, DEPTH, STAGES, HELD)),
                (_produce, (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, barriers, work,
                 CAUSAL, TOGETHER, CONSUMERS, COLUMNS, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
