// NVIDIA's spelling of the device vocabulary. hip/device/vendor.h is AMD's; kernels use only what both define.
//
// KERNEL(threads) starts a kernel, KERNEL_OF(threads, blocks) one of which so many blocks can share a unit, DEVICE a function,
// CONSTANT one for constants. GLOBAL and SHARED qualify pointers to device and shared memory.
// SHARED_MEMORY(name) declares the block's dynamic shared memory, SHARED_ARRAY a static array in it.
// One block per SM may have all registers: without the 1 ptxas can spill for the sake of a second.
#define KERNEL(threads) KERNEL_OF(threads, 1)
#define KERNEL_OF(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE __device__ __forceinline__
#define CONSTANT constexpr __host__ __device__
#define GLOBAL
#define SHARED
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

/// The condition, which rarely holds.
#define unlikely(condition) __builtin_expect(condition, 0)

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

DEVICE int thread_index() { return (int)threadIdx.x; }
DEVICE int wave_index() { return thread_index() / WAVE; }

/// A condition that is the same in all lanes of the wave; matrix instructions may depend on it.
DEVICE bool wave_agrees(bool condition) { return condition; }

/// The first lane's value, which the compiler knows to be the same in the whole wave.
DEVICE int wave_first(int value) { return __shfl_sync(0xffffffffu, value, 0); }

DEVICE int block_index() { return (int)blockIdx.x; }
DEVICE int grid_blocks() { return (int)gridDim.x; }

/// The value, in a way that keeps what is computed from it where it is used, out of long-lived registers.
DEVICE int unhoisted(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
DEVICE float unhoisted(float value) {
    asm volatile("" : "+f"(value));
    return value;
}
/// Likewise for a value that is the same in the whole wave, of which AMD's compiler keeps what it likes in scalar registers.
DEVICE int unhoisted_uniform(int value) { return unhoisted(value); }

/// Waits for every thread of the block.
DEVICE void barrier() { __syncthreads(); }

/// Waits likewise; whether any thread says so, the same answer in all.
DEVICE bool barrier_any(bool condition) { return __syncthreads_or(condition) != 0; }

/// For a block in two halves: waits for the threads of this half; whether any of them says so.
DEVICE bool half_any(int half, bool condition) {
    int any;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.b32 in, %3, 0;\nbarrier.cta.red.or.pred.aligned out, %1, %2, in;\n"
        "selp.b32 %0, 1, 0, out;\n}"
        : "=r"(any)
        : "r"(1 + half), "n"(THREADS / 2), "r"((int)condition)
        : "memory");
    return any != 0;
}

/// Likewise: waits for the other half to call, wherever in the code it does. Calls count alternately as even and odd: a half that
/// calls again must not be taken for the other.
DEVICE void meet_half(int half, int odd) {
    asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(3 + 2 * odd + half), "n"(THREADS) : "memory");
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(4 + 2 * odd - half), "n"(THREADS) : "memory");
}

/// Waits for the lanes of the wave; what they stored before, all of them see.
DEVICE void wave_barrier() { __syncwarp(); }

/// Whether any lane of the wave says so, the same answer in all.
DEVICE bool wave_any(bool condition) { return __any_sync(0xffffffffu, condition); }

/// Index of the highest bit of a positive number.
DEVICE int highest_bit(int x) { return 31 - __clz(x); }

/// Pointer to device memory at an address.
template <typename T>
DEVICE T GLOBAL* global_pointer(uint64 address) {
    return (T*)address;
}

/// Value of the lane whose index differs in the bits of `mask`.
template <typename T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

/// Value of the lane `delta` below; the lane's own where there is none.
template <typename T>
DEVICE T shuffle_up(T value, int delta) {
    return __shfl_up_sync(0xffffffffu, value, delta);
}

DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// 1 / x within an ulp or two; 0 of what is infinite.
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE uint32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(uint32 x) { return __uint_as_float(x); }

/// The larger value; a NaN gives way to the other.
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }

/// The value in device memory as of now, past what this unit may remember of it.
DEVICE int load_now(const int GLOBAL* from) {
    int value;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

/// Asks for the 128 bytes at an address, to be near when they are loaded.
DEVICE void fetch_near(const void GLOBAL* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/// 16 bytes from device to shared memory, zeros if `valid` is false (the source is then not read). Both 16-byte aligned.
DEVICE void copy16_async(void SHARED* to, const void GLOBAL* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
#else
#error "kernels need sm_80 or later"
#endif
}

/// Closes the group of the copies issued so far.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of this thread's groups are under way.
template <int pending>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// Waits for the kernels before this one in the stream, if it was launched before they ended.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel of the stream be launched; it still waits for the end of this one.
DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Two floats rounded to bf16, the first in the low half.
DEVICE uint32 pack_bf16(float low, float high) {
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// Two floats rounded to f16, the first in the low half.
DEVICE uint32 pack_f16(float low, float high) {
    uint32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

DEVICE float f16_to_float(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

/// Two f16 of a word as floats.
DEVICE void unpack_f16(uint32 packed, float& low, float& high) {
    low = f16_to_float((uint16)packed);
    high = f16_to_float((uint16)(packed >> 16));
}

/// Whether the device converts e4m3 and e4m3fnuz to floats; for those that do not, the function below is never called.
constexpr bool EXPANDS_E4M3 = false, EXPANDS_E4M3FNUZ = false;
DEVICE void fp8x4_to_float(uint32, float (&)[4]) {}

/// Whether the device converts e4m3 itself; if not, the function below is never called.
constexpr bool CONVERTS_E4M3 = __CUDA_ARCH__ >= 890;

/// Four e4m3 as two pairs of f16, exactly.
DEVICE void e4m3x4_to_f16(uint32 bytes, uint32& first, uint32& second) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(first), "=r"(second)
        : "r"(bytes));
#endif
}

/// Product of two pairs of bf16, and of two pairs of f16.
DEVICE uint32 multiply_bf16x2(uint32 a, uint32 b) {
    uint32 product;
    // A product less zero keeps its sign and value: sm_80 has only the fused form.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

DEVICE uint32 multiply_f16x2(uint32 a, uint32 b) {
    uint32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/// Bytes `selector` (a nibble each) of the eight bytes `high:low`.
DEVICE uint32 select_bytes(uint32 low, uint32 high, uint32 selector) { return __byte_perm(low, high, selector); }
