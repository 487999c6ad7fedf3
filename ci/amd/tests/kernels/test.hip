// Small kernels for the emulator's own tests. PLANT_* macros put a bug in.
#define GLOBAL extern "C" __attribute__((global))
#define SHARED __attribute__((shared))
#define BARRIER() __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier(); __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")

typedef float float4 __attribute__((ext_vector_type(4)));
typedef float float16 __attribute__((ext_vector_type(16)));
typedef short short4 __attribute__((ext_vector_type(4)));
typedef _Float16 half4 __attribute__((ext_vector_type(4)));

static inline __attribute__((device)) int thread() { return __builtin_amdgcn_workitem_id_x(); }
static inline __attribute__((device)) int block() { return __builtin_amdgcn_workgroup_id_x(); }

GLOBAL void vector_add(const float* a, const float* b, float* out, int n) {
    int i = block() * 256 + thread();
    if (i < n) out[i] = a[i] + b[i];
}

// Blocks of the grid, which the dispatch packet tells.
GLOBAL void blocks_of_grid(int* out) {
    out[block() * 64 + thread()] = __builtin_amdgcn_grid_size_x() / 64;
}

// One block of 256 threads sums n values: wave shuffles, then LDS.
GLOBAL void reduce(const float* x, float* out, int n) {
    SHARED float sums[4];
    float sum = 0;
    for (int i = thread(); i < n; i += 256) sum += x[i];
    for (int step = 32; step > 0; step /= 2)
        sum += __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((thread() ^ step) * 4, __builtin_bit_cast(int, sum)));
    if (thread() % 64 == 0) sums[thread() / 64] = sum;
#ifndef PLANT_MISSING_BARRIER
    BARRIER();
#endif
    if (thread() == 0) {
        float total = 0;
        for (int w = 0; w < 4; w++) total += sums[w];
        *out = total;
    }
}

// Reverses blocks of 256 values through LDS.
GLOBAL void reverse(const int* x, int* out) {
    SHARED int tile[256];
#ifdef PLANT_LDS_OVERRUN
    tile[thread() + 1] = x[block() * 256 + thread()];
#else
    tile[thread()] = x[block() * 256 + thread()];
#endif
    BARRIER();
    out[block() * 256 + thread()] = tile[255 - thread()];
}

// Reads one element past what is asked for where the bug is planted.
GLOBAL void shift(const int* x, int* out, int n) {
    int i = block() * 256 + thread();
#ifdef PLANT_OUT_OF_BOUNDS
    out[i] = x[i + (1 << 20)];
#else
    out[i] = i + 1 < n ? x[i + 1] : 0;
#endif
}

GLOBAL void count(const int* x, unsigned* bins, float* sum, int n) {
    int i = block() * 256 + thread();
    if (i >= n) return;
    __hip_atomic_fetch_add(&bins[x[i] & 7], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_add(sum, 1.0f, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Elementary functions and exact division: out[k][i].
GLOBAL void functions(const float* x, const float* y, float* out, int n) {
    int i = block() * 256 + thread();
    if (i >= n) return;
    out[i] = x[i] / y[i];
    out[n + i] = __builtin_exp2f(x[i]);
    out[2 * n + i] = __builtin_log2f(y[i]);
    out[3 * n + i] = __builtin_sqrtf(y[i]);
    out[4 * n + i] = __builtin_fmaf(x[i], y[i], 1.0f);
    out[5 * n + i] = (float)((double)x[i] / (double)y[i]);
    out[6 * n + i] = __builtin_rintf(x[i]) + __builtin_floorf(y[i]);
    out[7 * n + i] = (float)(long long)(x[i] * 1e6f);
}

// D = A B^T with A [m][k], B [m][k], one wave, one instruction; D [m][m] row major.
#ifdef PLANT_LANE_MAPPING
#define ROW32(r, lane) ((r) / 4 * 8 + (lane) / 32 + (r) % 4 * 2)
#else
#define ROW32(r, lane) ((r) / 4 * 8 + (lane) / 32 * 4 + (r) % 4)
#endif
#define MATRIX16(name, vec, elem, per, k, builtin)                                        \
    GLOBAL void name(const elem* a, const elem* b, float* d) {                            \
        int lane = thread(), at = lane % 16 * k + lane / 16 * per;                        \
        float4 sum = {0, 0, 0, 0};                                                        \
        sum = builtin(*(const vec*)(a + at), *(const vec*)(b + at), sum, 0, 0, 0);        \
        for (int r = 0; r < 4; r++) d[(lane / 16 * 4 + r) * 16 + lane % 16] = sum[r];     \
    }
#define MATRIX32(name, vec, elem, per, k, builtin)                                        \
    GLOBAL void name(const elem* a, const elem* b, float* d) {                            \
        int lane = thread(), at = lane % 32 * k + lane / 32 * per;                        \
        float16 sum = {};                                                                 \
        sum = builtin(*(const vec*)(a + at), *(const vec*)(b + at), sum, 0, 0, 0);        \
        for (int r = 0; r < 16; r++) d[ROW32(r, lane) * 32 + lane % 32] = sum[r];         \
    }
MATRIX16(bf16_16x16x16, short4, short, 4, 16, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k)
MATRIX32(bf16_32x32x8, short4, short, 4, 8, __builtin_amdgcn_mfma_f32_32x32x8bf16_1k)
MATRIX16(f16_16x16x16, half4, _Float16, 4, 16, __builtin_amdgcn_mfma_f32_16x16x16f16)
MATRIX32(f16_32x32x8, half4, _Float16, 4, 8, __builtin_amdgcn_mfma_f32_32x32x8f16)
MATRIX16(fp8_16x16x32, long, unsigned char, 8, 32, __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8)
MATRIX32(fp8_32x32x16, long, unsigned char, 8, 16, __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8)

// C [m][n] = A [m][k] B [n][k]^T in bfloat16, 32 by 32 tiles through LDS, 64 threads.
GLOBAL void gemm(const short* a, const short* b, float* c, int n, int k) {
    SHARED short ta[32 * 8], tb[32 * 8];
    int lane = thread(), tiles = n / 32, row = block() / tiles * 32, column = block() % tiles * 32;
    float16 sum = {};
    for (int k0 = 0; k0 < k; k0 += 8) {
        int r = lane / 2, at = lane % 2 * 4;
        *(short4*)(ta + r * 8 + at) = *(const short4*)(a + (row + r) * k + k0 + at);
        *(short4*)(tb + r * 8 + at) = *(const short4*)(b + (column + r) * k + k0 + at);
        BARRIER();
        int from = lane % 32 * 8 + lane / 32 * 4;
        sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(*(short4*)(ta + from), *(short4*)(tb + from), sum, 0, 0, 0);
        BARRIER();
    }
    for (int r = 0; r < 16; r++) c[(row + ROW32(r, lane)) * n + column + lane % 32] = sum[r];
}

// Spills: an array that is indexed by data lives in the private segment.
GLOBAL void private_memory(const int* x, int* out) {
    int values[64];
    for (int i = 0; i < 64; i++) values[i] = x[i] * thread();
    out[thread()] = values[x[thread()] & 63];
}

// Never ends where *flag is 0.
GLOBAL void spin(const volatile int* flag) {
    while (*flag == 0) {}
}

// An instruction of gfx942 that the emulator does not have.
GLOBAL void unknown(int* out) {
    int x;
    asm volatile("v_sin_f16 %0, %1" : "=v"(x) : "v"(out[0]));
    out[0] = x;
}
