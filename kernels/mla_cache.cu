// The cache's writer and its reader back: rows of KV_DTYPE in pages, rows of Q_DTYPE outside. Any grid does: blocks take rows
// in turn.

constexpr int TEAM = 32;  // threads of a row
constexpr int TEAMS = THREADS / TEAM;

constexpr int DS_LATENT = 512;    // a row of Fp8DsMla: 512 e4m3 latents,
constexpr int DS_GROUP = 128;     // a float32 scale per 128 of them,
constexpr int DS_ROPE_AT = 528;   // and 64 bf16 rope values
constexpr int DS_ROPE = 64;

constexpr bool FNUZ = KV_DTYPE == FP8_E4M3FNUZ;
constexpr float FP8_MAX = FNUZ ? 240.0f : 448.0f;
constexpr int FP8_BIAS = FNUZ ? 8 : 7;
// vLLM divides by 224 where the format's own maximum is 240.
constexpr float DS_DIVISOR = FNUZ ? 224.0f : 448.0f;

/// The nearest 8-bit float, ties to even, saturating; a NaN stays one.
DEVICE uint8 narrow_fp8(float value) {
    uint32 bits = float_bits(value);
    uint32 sign = bits >> 31 << 7;
    float magnitude = bits_float(bits & 0x7fffffffu);
    constexpr uint32 LARGEST = FNUZ ? 0x7f : 0x7e;
    if (value != value) return FNUZ ? 0x80 : (uint8)(0x7f | sign);
    uint32 code;
    if (magnitude >= FP8_MAX) {
        code = LARGEST;
    } else if (magnitude < (FNUZ ? 0x1p-7f : 0x1p-6f)) {
        // Subnormal: a multiple of 2^-(bias + 2), rounded by adding a number whose last bit is 1.
        float multiple = magnitude * (FNUZ ? 0x1p10f : 0x1p9f);
        code = float_bits(multiple + 0x1p23f) & 0xf;
    } else {
        uint32 rounded = float_bits(magnitude) + 0x7ffffu + (float_bits(magnitude) >> 20 & 1);
        code = (rounded >> 20) - ((127 - FP8_BIAS) << 3);
        code = code < LARGEST ? code : LARGEST;
    }
    return FNUZ && code == 0 ? 0 : (uint8)(code | sign);
}

DEVICE float widen_fp8(uint8 byte) {
    uint32 magnitude = byte & 0x7fu;
    if (FNUZ ? byte == 0x80 : magnitude == 0x7f) return bits_float(0x7fc00000u);
    float value = bits_float(magnitude << 20) * (FNUZ ? 0x1p119f : 0x1p120f);
    return byte & 0x80 ? -value : value;
}

template <int dtype>
DEVICE float read(uint64 base, int64 index) {
    if constexpr (bytes_of(dtype) == 1) {
        return widen_fp8(global_pointer<const uint8>(base)[index]);
    } else {
        return read_element<dtype>(base, index);
    }
}

template <int dtype>
DEVICE void write(uint64 base, int64 index, float value) {
    if constexpr (bytes_of(dtype) == 1) {
        global_pointer<uint8>(base)[index] = narrow_fp8(value);
    } else {
        write_element<dtype>(base, index, value);
    }
}

/// Copies `width` elements from Q_DTYPE to the cache; equal types bit by bit.
DEVICE void write_part(uint64 from, int64 from_at, uint64 to, int64 to_at, int width, float scale) {
    for (int i = thread_index() % TEAM; i < width; i += TEAM) {
        if constexpr (Q_DTYPE == KV_DTYPE && bytes_of(Q_DTYPE) == 2) {
            global_pointer<uint16>(to)[to_at + i] = global_pointer<const uint16>(from)[from_at + i];
        } else {
            float value = read<Q_DTYPE>(from, from_at + i);
            write<KV_DTYPE>(to, to_at + i, bytes_of(KV_DTYPE) == 1 ? value / scale : value);
        }
    }
}

/// Writes one row of Fp8DsMla at address `to`.
DEVICE void write_ds_row(const CacheWriteParams& p, int token, uint64 to) {
    int lane = thread_index() % TEAM;
    for (int group = 0; group < DS_LATENT / DS_GROUP; group++) {
        float value[DS_GROUP / TEAM];
        float largest = 0.0f;
        UNROLL for (int i = 0; i < DS_GROUP / TEAM; i++) {
            value[i] = read<Q_DTYPE>(p.kv_c, token * p.kv_c_stride + group * DS_GROUP + i * TEAM + lane);
            largest = maximum(largest, bits_float(float_bits(value[i]) & 0x7fffffffu));
        }
        largest = maximum(lanes_maximum<TEAM>(largest) / DS_DIVISOR, 1.0e-4f);
        // The next power of two.
        float scale = bits_float((float_bits(largest) + 0x7fffffu) & 0x7f800000u);
        UNROLL for (int i = 0; i < DS_GROUP / TEAM; i++) {
            global_pointer<uint8>(to)[group * DS_GROUP + i * TEAM + lane] = narrow_fp8(value[i] / scale);
        }
        if (lane == 0) global_pointer<float>(to + DS_LATENT)[group] = scale;
    }
    for (int i = lane; i < DS_ROPE; i += TEAM) {
        write<BF16>(to + DS_ROPE_AT, i, i < p.rope_dim ? read<Q_DTYPE>(p.k_pe, token * p.k_pe_stride + i) : 0.0f);
    }
}

KERNEL(THREADS) mla_cache_write(const CacheWriteParams p) {
    grid_dependency_launch();  // what a kernel after this one reads before its turn is not of the rows written here, or read again
    grid_dependency_wait();
    for (int64 at = (int64)block_index() * TEAMS + thread_index() / TEAM; at < p.num_tokens; at += (int64)grid_blocks() * TEAMS) {
        int token = (int)at;
        int64 slot = global_pointer<const int64>(p.slot_mapping)[token];
        int64 page = slot / p.page_size;
        int64 entry = slot % p.page_size;
        if (slot < 0 || page >= p.num_pages) continue;
        if (p.layout == FP8_DS_MLA) {
            write_ds_row(p, token, p.kv + page * p.kv_stride_page + entry * p.kv_stride_token);
            continue;
        }
        write_part(p.kv_c, token * p.kv_c_stride, p.kv, page * p.kv_stride_page + entry * p.kv_stride_token, p.kv_lora_rank,
                   p.kv_scale);
        write_part(p.k_pe, token * p.k_pe_stride, p.k_rope, page * p.rope_stride_page + entry * p.rope_stride_token,
                   p.rope_dim, p.kv_scale);
    }
}

/// Copies `width` cached elements to an output row; equal types bit by bit.
DEVICE void gather_part(uint64 from, int64 from_at, uint64 to, int64 to_at, int width, float scale, bool valid) {
    for (int i = thread_index() % TEAM; i < width; i += TEAM) {
        if constexpr (Q_DTYPE == KV_DTYPE && bytes_of(Q_DTYPE) == 2) {
            global_pointer<uint16>(to)[to_at + i] = valid ? global_pointer<const uint16>(from)[from_at + i] : 0;
        } else {
            float value = valid ? read<KV_DTYPE>(from, from_at + i) : 0.0f;
            write<Q_DTYPE>(to, to_at + i, bytes_of(KV_DTYPE) == 1 ? value * scale : value);
        }
    }
}

KERNEL(THREADS) mla_cache_gather(const CacheGatherParams p) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int GLOBAL* first_row = global_pointer<const int>(p.cu_seq_lens);
    int rows = smaller(first_row[p.batch], p.num_tokens);
    for (int64 at = (int64)block_index() * TEAMS + thread_index() / TEAM; at < rows; at += (int64)grid_blocks() * TEAMS) {
        int row = (int)at;
        int seq = 0;  // the last sequence that begins at or before the row
        for (int high = p.batch; high - seq > 1;) {
            int middle = (seq + high) / 2;
            if (first_row[middle] <= row) {
                seq = middle;
            } else {
                high = middle;
            }
        }
        int token = row - first_row[seq] + (p.seq_starts ? global_pointer<const int>(p.seq_starts)[seq] : 0);
        int column = token / p.page_size;
        bool valid = token >= 0 && column < p.table_width;
        int64 page = valid ? global_pointer<const int>(p.block_table)[seq * p.table_stride + column] : 0;
        // A page that the cache does not have reads as zeros.
        valid = valid && page >= 0 && page < p.num_pages;
        int64 entry = token % p.page_size;
        int64 latent = page * p.kv_stride_page + entry * p.kv_stride_token;
        int64 to = row * p.out_stride;
        if (p.layout == FP8_DS_MLA) {
            for (int i = thread_index() % TEAM; i < p.kv_lora_rank; i += TEAM) {
                float scale = valid ? global_pointer<const float>(p.kv + latent + DS_LATENT)[i / DS_GROUP] : 0.0f;
                float value = valid ? widen_fp8(global_pointer<const uint8>(p.kv)[latent + i]) : 0.0f;
                write<Q_DTYPE>(p.out, to + i, value * scale);
            }
            for (int i = thread_index() % TEAM; i < p.rope_dim; i += TEAM) {
                write<Q_DTYPE>(p.out, to + p.kv_lora_rank + i, valid ? read<BF16>(p.kv + latent + DS_ROPE_AT, i) : 0.0f);
            }
            continue;
        }
        gather_part(p.kv, latent, p.out, to, p.kv_lora_rank, p.kv_scale, valid);
        gather_part(p.k_rope, page * p.rope_stride_page + entry * p.rope_stride_token, p.out, to + p.kv_lora_rank, p.rope_dim,
                    p.kv_scale, valid);
    }
}
