// What the kernels share and no vendor sees: 16-byte words, element types, reductions, lengths, splits and cached rows.

struct alignas(16) Word4 {
    uint32 x, y, z, w;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};
struct alignas(8) Word2 {
    uint32 x, y;
};

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
#define NEGATIVE_INFINITY bits_float(0xff800000u)

/// Bytes of an element of a type.
constexpr int bytes_of(int dtype) { return dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1; }

constexpr bool Q_IS_BF16 = Q_DTYPE == BF16;

CONSTANT int divide_up(int a, int b) { return (a + b - 1) / b; }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

/// Two floats rounded to Q_DTYPE, the first in the low half.
DEVICE uint32 pack(float low, float high) { return Q_IS_BF16 ? pack_bf16(low, high) : pack_f16(low, high); }

/// The inverse of `pack`.
DEVICE void unpack(uint32 packed, float& low, float& high) {
    if constexpr (Q_IS_BF16) {
        low = bits_float(packed << 16);
        high = bits_float(packed & 0xffff0000u);
    } else {
        unpack_f16(packed, low, high);
    }
}

/// Element `index` of device memory at `base`, of F32, F16 or BF16.
template <int dtype>
DEVICE float read_element(uint64 base, int64 index) {
    if constexpr (dtype == F32) return global_pointer<const float>(base)[index];
    uint16 bits = global_pointer<const uint16>(base)[index];
    return dtype == BF16 ? bits_float((uint32)bits << 16) : f16_to_float(bits);
}

template <int dtype>
DEVICE void write_element(uint64 base, int64 index, float value) {
    if constexpr (dtype == F32) {
        global_pointer<float>(base)[index] = value;
    } else {
        uint32 packed = dtype == BF16 ? pack_bf16(value, 0.0f) : pack_f16(value, 0.0f);
        global_pointer<uint16>(base)[index] = (uint16)packed;
    }
}

/// Reductions over `width` neighbouring lanes, `width` a power of two; the result is in all of them.
template <int width>
DEVICE float lanes_maximum(float value) {
    UNROLL for (int mask = width / 2; mask > 0; mask /= 2) value = maximum(value, shuffle_xor(value, mask));
    return value;
}

template <int width>
DEVICE float lanes_sum(float value) {
    UNROLL for (int mask = width / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

// ---- 8-bit floats ----

/// Four 8-bit floats of KV_DTYPE as two pairs of Q_DTYPE, exactly, NaN included. Where the device has no instruction for
/// it the bits are moved to where the wider type has them, and a power of two makes up for the difference of the exponent biases.
DEVICE void widen_fp8x4(uint32 bytes, uint32& first, uint32& second) {
    if constexpr (CONVERTS_E4M3 && KV_DTYPE == FP8_E4M3) {
        e4m3x4_to_f16(bytes, first, second);
        if constexpr (Q_IS_BF16) {
            float low, high;
            unpack_f16(first, low, high);
            first = pack_bf16(low, high);
            unpack_f16(second, low, high);
            second = pack_bf16(low, high);
        }
        return;
    }
    if constexpr (KV_DTYPE == FP8_E4M3 ? EXPANDS_E4M3 : EXPANDS_E4M3FNUZ) {
        float value[4];
        fp8x4_to_float(bytes, value);
        // A bf16 is the upper half of a float.
        auto narrow = [](float low, float high) {
            return Q_IS_BF16 ? select_bytes(float_bits(low), float_bits(high), 0x7632) : pack_f16(low, high);
        };
        first = narrow(value[0], value[1]);
        second = narrow(value[2], value[3]);
        return;
    }
    constexpr bool fnuz = KV_DTYPE == FP8_E4M3FNUZ;
    uint32 half[2] = {select_bytes(bytes, 0, 0x1404), select_bytes(bytes, 0, 0x3424)};
    UNROLL for (int i = 0; i < 2; i++) {
        uint32 sign = half[i] & 0x80008000u;
        uint32 magnitude = half[i] & 0x7f007f00u;
        uint32 bits = magnitude >> (Q_IS_BF16 ? 4 : 1);
        if constexpr (fnuz) {
            uint32 nan = (sign & ~(magnitude + 0x7f007f00u)) >> 15;
            bits |= nan * 0x7fc0u;
        } else if constexpr (Q_IS_BF16) {
            bits += ((bits + 0x00100010u) & 0x08000800u) * 15;
        } else {
            bits |= (bits + 0x00800080u) & 0x40004000u;
        }
        if constexpr (Q_IS_BF16) {
            half[i] = multiply_bf16x2(bits | sign, fnuz ? 0x7b007b00u : 0x7b807b80u);
        } else {
            half[i] = multiply_f16x2(bits | sign, fnuz ? 0x58005800u : 0x5c005c00u);
        }
    }
    first = half[0];
    second = half[1];
}

// ---- lengths and splits (terms: DecodeParams) ----

/// a / b for a >= 0 and b > 0: a division of integers takes three times as long, and much code.
DEVICE int quotient(int a, int b) {
    if (b == 1) return a;
    float inverse = reciprocal((float)unhoisted_uniform(b));
    int q = (int)((float)a * inverse);
    q += (int)((float)(a - q * b) * inverse);
    int rest = a - q * b;
    return q + (rest >= b) - (rest < 0);
}
DEVICE int quotient_up(int a, int b) { return quotient(a + b - 1, b); }

/// Likewise, given what `inverse_of` in params.rs makes of b: the product is right or one too large.
DEVICE int quotient_by(int a, int b, uint32 inverse) {
    int q = b == 1 ? a : (int)((uint64)(uint32)a * inverse >> 32);
    return q - ((uint32)(q * b) > (uint32)a);
}

/// Whether there is one virtual sequence, and the schedule is EITHER: select_few.rs chooses the kernel of two forms for no other steps.
constexpr bool ONE_SEQUENCE = FORM == 9;

DEVICE int num_groups(const DecodeParams& p) { return ONE_SEQUENCE ? 1 : p.num_groups; }
/// The sequence of a virtual one.
DEVICE int seq_of(const DecodeParams& p, int virtual_seq) {
    return ONE_SEQUENCE ? 0 : quotient_by(virtual_seq, num_groups(p), p.groups_inverse);
}
/// Where a token stands: the column of the block table that has its page, and its entry of that page.
DEVICE int column_of(const DecodeParams& p, int token) { return quotient_by(token, p.page_size, p.page_inverse); }
DEVICE int entry_of(const DecodeParams& p, int token) { return token - column_of(p, token) * p.page_size; }
DEVICE int group_rows(const DecodeParams& p) { return p.query_group * p.num_heads; }

/// A length within what a row of the block table addresses.
DEVICE int usable_length(const DecodeParams& p, int length) {
    int64 capacity = (int64)p.table_width * p.page_size;
    return larger(length < capacity ? length : (int)capacity, 0);
}

/// Cached tokens of a sequence.
DEVICE int sequence_length(const DecodeParams& p, int seq) {
    return usable_length(p, load_now(global_pointer<const int>(p.seq_lens) + seq));
}

/// Tokens that query token `token` sees of a sequence of `length` tokens; not below 0.
DEVICE int visible_tokens(const DecodeParams& p, int length, int token) {
    return p.causal ? larger(length - p.query_len + 1 + token, 0) : length;
}

/// Last query token of a virtual sequence.
DEVICE int last_token(const DecodeParams& p, int virtual_seq) {
    if (ONE_SEQUENCE) return p.query_len - 1;
    int group = virtual_seq - seq_of(p, virtual_seq) * num_groups(p);
    return smaller((group + 1) * p.query_group, p.query_len) - 1;
}

/// Tokens that the last row of a virtual sequence sees.
DEVICE int extent(const DecodeParams& p, int virtual_seq) {
    int seq = seq_of(p, virtual_seq);
    return visible_tokens(p, sequence_length(p, seq), last_token(p, virtual_seq));
}

/// The balanced schedule: slot offsets, then parts, whose words `balance` of src/plan/balance.rs describes.
struct Schedule {
    const int GLOBAL* slot_begin;
    const int GLOBAL* parts;
};
constexpr int PART_WORDS = 16;
constexpr int ARRIVAL_WORD = 5;  // of a part, and the one after it: zero between layers
constexpr int MERGES_WORD = 7;   // of a part: whether stage 1 merges the pieces of sequences
constexpr int FIRST_WORD = 8;    // of a part: where the slots of its first sequence begin, and how many there are
constexpr int SHARE_WORD = 10;   // of a part: which share stage 2 merges for it, of how many
constexpr int MERGED_WORD = 12;  // of a part: of which sequence, where its slots begin, and how many there are
constexpr int LENGTH_WORD = 15;  // of a part: tokens of its first sequence

/// Whether there is one: of a step of either kind, where blocks do not cut pieces themselves.
DEVICE bool is_balanced(const DecodeParams& p) {
    return ONE_SEQUENCE || p.schedule_kind == BALANCED || p.schedule_kind == EITHER;
}

DEVICE Schedule schedule_of(const DecodeParams& p) {
    const int GLOBAL* table = global_pointer<const int>(p.schedule);
    int virtual_seqs = p.batch * num_groups(p);
    return {table, table + divide_up(virtual_seqs + 1, PART_WORDS) * PART_WORDS};
}

/// Tokens of one split of an even or chunked schedule.
DEVICE int split_length(const DecodeParams& p, int tokens) {
    return p.schedule_kind == CHUNKED ? p.split_tokens : quotient_up(tokens, p.num_kv_splits);
}

/// Where the partial results of a virtual sequence that is not empty begin, and how many there are; `count` is 0 if its one
/// piece is written straight to the output. For schedule OWN, which has lists of its own, `own_slots`.
struct Slots {
    int64 begin;
    int count;
};
DEVICE Slots balanced_slots(const DecodeParams& p, int virtual_seq) {
    const int GLOBAL* begin = schedule_of(p).slot_begin + virtual_seq;
    return {begin[0], begin[1] - begin[0]};
}
DEVICE Slots slots_of(const DecodeParams& p, int virtual_seq) {
    if (is_balanced(p)) return balanced_slots(p, virtual_seq);
    int tokens = extent(p, virtual_seq);
    bool direct = p.num_kv_splits == 1 || (p.schedule_kind == CHUNKED && tokens <= p.split_tokens);
    int count = direct ? 0 : smaller(quotient_up(tokens, split_length(p, tokens)), p.num_kv_splits);
    return {(int64)virtual_seq * p.num_kv_splits, count};
}

/// Where a row of a group belongs; `valid` is false for rows past the group's or the sequence's end.
struct Row {
    int seq, token, head;
    bool valid;
};
DEVICE Row row_of(const DecodeParams& p, int virtual_seq, int row) {
    if (ONE_SEQUENCE) virtual_seq = 0;
    int groups = num_groups(p);
    int seq = seq_of(p, virtual_seq);
    int local = quotient_by(row, p.num_heads, p.heads_inverse);
    int token = (virtual_seq - seq * groups) * p.query_group + local;
    return {seq, token, row - local * p.num_heads, row < group_rows(p) && token < p.query_len};
}

DEVICE uint16 GLOBAL* output_row(const DecodeParams& p, const Row& row) {
    return global_pointer<uint16>(p.out) + row.seq * p.out_stride_batch + row.token * p.out_stride_token +
           row.head * p.out_stride_head;
}

/// Where a row's result goes: its partial output in `slot` or, if that is negative, the output.
DEVICE uint16 GLOBAL* result_row(const DecodeParams& p, const Row& row, int64 slot, int group_row) {
    if (slot < 0) return output_row(p, row);
    return global_pointer<uint16>(p.partial_out) + (slot * group_rows(p) + group_row) * p.kv_lora_rank;
}

/// What a row's sums are multiplied by, given that of their weights. Partial outputs stay in the cache's own units, a mean of
/// whose values always fits 16 bits; stage 2 scales them. 0 for a row that saw nothing: a NaN must show.
DEVICE float result_scale(const DecodeParams& p, float weight, int64 slot) {
    return weight == 0.0f ? 0.0f : (slot < 0 ? p.kv_scale : 1.0f) * reciprocal(weight);
}

/// A capped logit in powers of two, given the logit times `2 LOG2_E / softcap`: c tanh(y) = c (1 - 2 / (exp(2 y) + 1)). A division proper
/// would take registers from all else and, on AMD, make NaN of what exceeds 2^127.
DEVICE float capped(float softcap, float power) { return softcap * LOG2_E * (1.0f - 2.0f * reciprocal(exp2(power) + 1.0f)); }

DEVICE void write_lse(const DecodeParams& p, const Row& row, float lse) {
    if (p.lse == 0) return;
    global_pointer<float>(p.lse)[row.seq * p.lse_stride_batch + row.token * p.lse_stride_token + row.head] = lse;
}

// ---- short vectors ----

/// Adds `count` neighbouring floats of shared memory, aligned to their size up to 16 bytes.
template <int count>
DEVICE void read_floats(float (&sum)[count], const float SHARED* from) {
    if constexpr (count % 4 == 0) {
        UNROLL for (int i = 0; i < count; i += 4) {
            Float4 part = *(const Float4 SHARED*)(from + i);
            sum[i] += part.x;
            sum[i + 1] += part.y;
            sum[i + 2] += part.z;
            sum[i + 3] += part.w;
        }
    } else {
        UNROLL for (int i = 0; i < count; i++) sum[i] += from[i];
    }
}

/// Stores `count` neighbouring values as Q_DTYPE, aligned to their size up to 16 bytes.
template <int count>
DEVICE void write_weights(uint16 SHARED* to, const float (&value)[count]) {
    if constexpr (count == 1) {
        *to = (uint16)pack(value[0], 0.0f);
    } else if constexpr (count == 2) {
        *(uint32 SHARED*)to = pack(value[0], value[1]);
    } else if constexpr (count == 4) {
        *(Word2 SHARED*)to = {pack(value[0], value[1]), pack(value[2], value[3])};
    } else {
        static_assert(count % 8 == 0, "whole words");
        UNROLL for (int i = 0; i < count; i += 8) {
            *(Word4 SHARED*)(to + i) = {pack(value[i], value[i + 1]), pack(value[i + 2], value[i + 3]),
                                        pack(value[i + 4], value[i + 5]), pack(value[i + 6], value[i + 7])};
        }
    }
}

template <int count>
DEVICE void store_narrow(uint16 GLOBAL* to, const float (&value)[count]) {
    if constexpr (count == 2) {
        *(uint32 GLOBAL*)to = pack(value[0], value[1]);
    } else {
        UNROLL for (int i = 0; i < count; i++) to[i] = (uint16)pack(value[i], 0.0f);
    }
}
