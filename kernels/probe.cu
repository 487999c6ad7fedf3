// What the device can do at most, beside which benchmarks are read: reading memory, and multiplying matrices with the same
// instructions as the portable kernels (kernels/sm90/probe.cu has Hopper's own).

/// Reads `bytes` from `source`, a multiple of 64 per thread of the grid, 64 bytes at a time with all loads under way at once.
KERNEL(THREADS) probe_read(ProbeParams p) {
    const Word4 GLOBAL* from = global_pointer<const Word4>(p.source);
    int64 words = p.bytes / 16;
    int64 step = (int64)grid_blocks() * THREADS;
    uint32 sum = 0;
    for (int64 at = (int64)block_index() * THREADS + thread_index(); at + 3 * step < words; at += 4 * step) {
        Word4 a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
    }
    // Never so for the random content that is read, but the compiler cannot know.
    if (sum == 0x9e3779b9u) global_pointer<uint32>(p.out)[0] = sum;
}

/// `iterations` times 8 products of 16 x 16 x 16 per wave, operands in registers, taken from `source`.
KERNEL(THREADS) probe_matmul(ProbeParams p) {
    SHARED_ARRAY(uint16, tile, 32 * 24);
    const uint16 GLOBAL* from = global_pointer<const uint16>(p.source);
    for (int i = thread_index(); i < 32 * 24; i += THREADS) tile[i] = from[i];
    barrier();
    FragA a[2];
    FragB b[2];
    load_a(a[0], tile, 24);
    load_a(a[1], tile + 16 * 24, 24);
    load_b(b[0], tile + 16 * 24, 24);
    load_b(b[1], tile, 24);
    Accum sum[8] = {};
    NO_UNROLL for (int i = 0; i < p.iterations; i++) {
        UNROLL for (int n = 0; n < 8; n++) mma<Q_IS_BF16>(sum[n], a[n % 2], b[n / 2 % 2]);
    }
    float total = 0.0f;
    UNROLL for (int n = 0; n < 8; n++) {
        UNROLL for (int i = 0; i < MMA_ELEMS; i++) total += sum[n].value[i];
    }
    if (total == 0.5f) global_pointer<float>(p.out)[0] = total;
}
