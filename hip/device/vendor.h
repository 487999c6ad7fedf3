// AMD's spelling of the device vocabulary; kernels/vendor.h of the root package is NVIDIA's and documents it.
#define KERNEL(threads) \
    extern "C" __attribute__((global)) void __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(1)))
// Registers of a lane are shared out by the waves of a SIMD, of which a compute unit has four.
#define KERNEL_OF(threads, blocks)                                                                 \
    extern "C" __attribute__((global)) void __attribute__((amdgpu_flat_work_group_size(threads, threads), \
                                                           amdgpu_waves_per_eu((blocks) * (threads) / WAVE / 4)))
#define DEVICE inline __attribute__((device, always_inline))
#define CONSTANT constexpr __attribute__((host, device))
#define GLOBAL
#define SHARED
#define SHARED_MEMORY(name) extern __attribute__((shared)) __attribute__((aligned(16))) unsigned char name[]
#define SHARED_ARRAY(type, name, count) __attribute__((shared)) type name[count]
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("nounroll")
#define unlikely(condition) __builtin_expect(condition, 0)

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

DEVICE int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE int wave_index() { return thread_index() / WAVE; }
// As a scalar, so that a wave branches around what is not its own: matrix instructions ignore the execution mask.
DEVICE bool wave_agrees(bool condition) { return __builtin_amdgcn_readfirstlane(condition); }
DEVICE int block_index() { return (int)__builtin_amdgcn_workgroup_id_x(); }
DEVICE int grid_blocks() { return (int)(__builtin_amdgcn_grid_size_x() / THREADS); }

#if WAVE == 64
#define WAVE_BALLOT __builtin_amdgcn_ballot_w64
#else
#define WAVE_BALLOT __builtin_amdgcn_ballot_w32
#endif

DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE void wave_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

/// The compiler moves no instruction past this.
DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }

DEVICE int wave_first(int value) { return __builtin_amdgcn_readfirstlane(value); }

DEVICE bool wave_any(bool condition) { return WAVE_BALLOT(condition) != 0; }

/// Whether a condition holds, of each lane; it takes no vector register.
struct LaneFlags {
    uint64 bits;

    DEVICE bool all() const { return bits == ~0ull >> (64 - WAVE); }
    DEVICE bool mine() const { return bits >> (thread_index() % WAVE) & 1; }
};
DEVICE LaneFlags lane_flags(bool condition) { return {WAVE_BALLOT(condition)}; }

/// Two barriers apart at least from the next call.
DEVICE bool barrier_any(bool condition) {
    SHARED_ARRAY(int, any_of_wave, THREADS / WAVE);
    bool any = WAVE_BALLOT(condition) != 0;
    if (thread_index() % WAVE == 0) any_of_wave[thread_index() / WAVE] = any;
    barrier();
    any = false;
    UNROLL for (int wave = 0; wave < THREADS / WAVE; wave++) any |= any_of_wave[wave] != 0;
    return any;
}

DEVICE int highest_bit(int x) { return 31 - __builtin_clz(x); }

template <typename T>
DEVICE T GLOBAL* global_pointer(uint64 address) {
    // Through the address space of device memory, so that accesses are global and not flat.
    return (T*)(__attribute__((address_space(1))) T*)address;
}

template <typename T>
DEVICE T unhoisted(T value) {
    asm volatile("" : "+v"(value));
    return value;
}
DEVICE int unhoisted_uniform(int value) { return value; }

/// The kernel's only parameter, read anew wherever it is used: what is used rarely takes no registers meanwhile.
template <typename Params>
DEVICE const Params& reread(const Params&) {
    typedef const __attribute__((address_space(4))) Params Constant;
    uint64 at = (uint64)(Constant*)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(at));
    return *(const Params*)(Constant*)at;
}

/// The 32-bit words of a value of lane `from`.
template <typename T>
DEVICE T shuffle_from(T value, int from) {
    constexpr int WORDS = sizeof(T) / 4;
    int word[WORDS];
    __builtin_memcpy(word, &value, sizeof(T));
    UNROLL for (int i = 0; i < WORDS; i++) word[i] = __builtin_amdgcn_ds_bpermute(from * 4, word[i]);
    __builtin_memcpy(&value, word, sizeof(T));
    return value;
}

template <typename T>
DEVICE T shuffle_xor(T value, int mask) {
    return shuffle_from(value, thread_index() % WAVE ^ mask);
}

template <typename T>
DEVICE T shuffle_up(T value, int delta) {
    int lane = thread_index() % WAVE;
    return shuffle_from(value, lane >= delta ? lane - delta : lane);
}

// hipRTC puts a header of its own before every source, which defines functions of these names.
#define exp2 exp2_fast
#define log2 log2_fast
DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

DEVICE uint32 float_bits(float x) { return __builtin_bit_cast(uint32, x); }
DEVICE float bits_float(uint32 x) { return __builtin_bit_cast(float, x); }
DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Kernels do not overlap, so there is nothing that could be out of date, and nothing to be early for.
DEVICE int load_now(const int GLOBAL* from) { return *from; }
DEVICE void fetch_near(const void GLOBAL*) {}

/// Loads and stores at once: there is no copy past the registers that serves every architecture.
DEVICE void copy16_async(void SHARED* to, const void GLOBAL* from, bool valid) {
    typedef uint32 Vector __attribute__((ext_vector_type(4)));
    Vector word = {0, 0, 0, 0};
    if (valid) word = *(const __attribute__((address_space(1))) Vector*)(uint64)from;
    *(Vector SHARED*)to = word;
}

DEVICE void copy_commit() {}

template <int pending>
DEVICE void copy_wait() {}

DEVICE void grid_dependency_wait() {}
DEVICE void grid_dependency_launch() {}

/// A float rounded to bf16, ties to even, in the high half; a NaN stays one.
DEVICE uint32 round_bf16(float value) {
    uint32 bits = float_bits(value);
    uint32 rounded = bits + 0x7fffu + __builtin_amdgcn_ubfe(bits, 16, 1);
    return value != value ? bits | 0x400000u : rounded;
}

DEVICE uint32 pack_bf16(float low, float high) {
#if defined(__gfx950__)
    typedef __bf16 Pair __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32, (Pair){(__bf16)low, (__bf16)high});
#else
    return __builtin_amdgcn_perm(round_bf16(high), round_bf16(low), 0x07060302u);
#endif
}

/// The same of what is positive, 0 or a NaN with no more bits than a bf16 has, in fewer instructions.
DEVICE uint32 pack_bf16_weights(float low, float high) {
#if defined(__gfx950__)
    return pack_bf16(low, high);
#else
    auto round = [](uint32 bits) { return bits + 0x7fffu + __builtin_amdgcn_ubfe(bits, 16, 1); };
    return __builtin_amdgcn_perm(round(float_bits(high)), round(float_bits(low)), 0x07060302u);
#endif
}

DEVICE uint32 pack_f16(float low, float high) {
    typedef _Float16 Pair __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32, (Pair){(_Float16)low, (_Float16)high});
}

DEVICE float f16_to_float(uint16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }

DEVICE void unpack_f16(uint32 packed, float& low, float& high) {
    low = f16_to_float((uint16)packed);
    high = f16_to_float((uint16)(packed >> 16));
}

#if defined(__gfx942__)
constexpr bool EXPANDS_E4M3 = false, EXPANDS_E4M3FNUZ = true;
#elif defined(__gfx950__) || defined(__gfx1200__) || defined(__gfx1201__)
constexpr bool EXPANDS_E4M3 = true, EXPANDS_E4M3FNUZ = false;
#else
constexpr bool EXPANDS_E4M3 = false, EXPANDS_E4M3FNUZ = false;
#endif

/// Four 8-bit floats, of whichever kind the device has, as floats.
DEVICE void fp8x4_to_float(uint32 bytes, float (&value)[4]) {
#if defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1200__) || defined(__gfx1201__)
    auto low = __builtin_amdgcn_cvt_pk_f32_fp8((int)bytes, false);
    auto high = __builtin_amdgcn_cvt_pk_f32_fp8((int)bytes, true);
    value[0] = low[0];
    value[1] = low[1];
    value[2] = high[0];
    value[3] = high[1];
#endif
}

/// The same as two pairs of bf16 or f16.
template <bool bf16>
DEVICE void fp8x4_to_pairs(uint32 bytes, uint32& first, uint32& second) {
#if defined(__gfx950__)
    if constexpr (bf16) {
        first = __builtin_bit_cast(uint32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(bytes, 1.0f, false));
        second = __builtin_bit_cast(uint32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(bytes, 1.0f, true));
    } else {
        first = __builtin_bit_cast(uint32, __builtin_amdgcn_cvt_scalef32_pk_f16_fp8(bytes, 1.0f, false));
        second = __builtin_bit_cast(uint32, __builtin_amdgcn_cvt_scalef32_pk_f16_fp8(bytes, 1.0f, true));
    }
#else
    float value[4];
    fp8x4_to_float(bytes, value);
    // A bf16 is the upper half of a float, of which no more is in use.
    constexpr uint32 UPPER_HALVES = 0x07060302u;
    auto pair = [](float low, float high) {
        return bf16 ? __builtin_amdgcn_perm(float_bits(high), float_bits(low), UPPER_HALVES)
                    : __builtin_bit_cast(uint32, __builtin_amdgcn_cvt_pkrtz(low, high));  // exact
    };
    first = pair(value[0], value[1]);
    second = pair(value[2], value[3]);
#endif
}

/// Dies that blocks are dealt out to in turn, each with a second-level cache of its own.
#if defined(__gfx942__) || defined(__gfx950__)
constexpr int DIES = 8;
#else
constexpr int DIES = 1;
#endif

constexpr bool CONVERTS_E4M3 = false;
DEVICE void e4m3x4_to_f16(uint32, uint32&, uint32&) {}

DEVICE uint32 multiply_bf16x2(uint32 a, uint32 b) {
    // Exact products fit bf16, so their low halves are zero.
    float low = bits_float(a << 16) * bits_float(b << 16);
    float high = bits_float(a & 0xffff0000u) * bits_float(b & 0xffff0000u);
    return float_bits(low) >> 16 | (float_bits(high) & 0xffff0000u);
}

DEVICE uint32 multiply_f16x2(uint32 a, uint32 b) {
    typedef _Float16 Pair __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(uint32, __builtin_bit_cast(Pair, a) * __builtin_bit_cast(Pair, b));
}

DEVICE uint32 select_bytes(uint32 low, uint32 high, uint32 selector) {
    // v_perm_b32 takes a byte per selector and counts its second operand first.
    uint32 wide = (selector & 0xf) | (selector >> 4 & 0xf) << 8 | (selector >> 8 & 0xf) << 16 | (selector >> 12 & 0xf) << 24;
    return __builtin_amdgcn_perm(high, low, wide);
}
