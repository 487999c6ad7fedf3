// Hopper's vocabulary (sm_90a), beside vendor.h: bulk tensor copies, barriers that count bytes, matrix products of a warpgroup.
//
// A warpgroup is four consecutive warps. Its products multiply 64 x 16 by 16 x N and add to float32 registers; `d[4 j + e]`
// of a lane is row `lane / 4 + 8 (e / 2)` of its warp's sixteen, column `8 j + lane % 4 * 2 + e % 2`. Operands in shared memory
// lie in units of 64 columns: rows of 128 bytes, swizzled by 128 bytes, 1,024-byte aligned.

#define KERNEL_ONE_BLOCK(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define SHARED_MEMORY_1024(name) extern __shared__ __align__(1024) unsigned char name[]

/// A CUtensorMap: how copies cut boxes out of a tensor. Passed by value, as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64 word[16];
};

DEVICE uint32 shared_address(const void SHARED* pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

/// The warpgroup of this thread, in a register that the compiler knows to be the same in the whole warp. All lanes must ask.
DEVICE int warpgroup_index() { return __shfl_sync(0xffffffffu, thread_index() / 128, 0); }
/// Likewise the warp of this thread within its warpgroup.
DEVICE int warp_of_group() { return __shfl_sync(0xffffffffu, thread_index() / 32 % 4, 0); }

/// The value that a lane of the warp has. What is computed from it alone is computed once per warp, as operands of products need it.
template <typename T>
DEVICE T from_lane(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

/// Likewise that of a lane of the eight that this one is of.
template <typename T>
DEVICE T from_lane_of_8(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane, 8);
}

/// Keeps what reads these registers after what was written before: products under way write them later than the text says.
template <int count>
DEVICE void settle(float (&value)[count]) {
    UNROLL for (int i = 0; i < count; i++) asm volatile("" : "+f"(value[i])::"memory");
}

/// Gives up or takes registers, down or up to `count` per thread of the warpgroup.
template <int count>
DEVICE void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
DEVICE void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

/// Waits likewise; whether any of the threads says so.
DEVICE bool named_barrier_any(int name, int threads, bool condition) {
    int any;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.b32 in, %3, 0;\nbarrier.cta.red.or.pred.aligned out, %1, %2, in;\n"
        "selp.b32 %0, 1, 0, out;\n}"
        : "=r"(any)
        : "r"(name), "r"(threads), "r"((int)condition)
        : "memory");
    return any != 0;
}

/// Waits for `threads` threads that name the same barrier, 1 to 15.
DEVICE void named_barrier(int name, int threads) {
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
/// Counts as one that waits, and goes on.
DEVICE void named_barrier_arrive(int name, int threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
DEVICE void warp_barrier() { __syncwarp(); }
/// Whether any lane of the warp says so; the same answer in all.
DEVICE bool warp_any(bool condition) { return __any_sync(0xffffffffu, condition); }

/// True in one lane of the warp, all of whose lanes must ask: what it alone begins needs no loop over lanes.
DEVICE bool elected() {
    int is;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.b32 %0, 1, 0, one;\n}" : "=r"(is));
    return is != 0;
}

/// Makes this thread's ordinary stores to shared memory visible to matrix products and bulk copies.
DEVICE void publish_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The larger of two pairs of 16-bit integers, each.
DEVICE uint32 larger_pair(uint32 a, uint32 b) {
    uint32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// ---- barriers in shared memory: eight bytes, a phase that ends when all arrivals and bytes have come ----

DEVICE void barrier_init(uint32 at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
DEVICE void barrier_publish_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(uint32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
/// Arrives, and adds bytes for the phase to wait for.
DEVICE void barrier_expect(uint32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
/// Waits for the end of the phase of this parity; a new barrier counts as past phase 1.
DEVICE void barrier_wait(uint32 at, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at),
        "r"(parity)
        : "memory");
}

/// Whether the phase of this parity has ended.
DEVICE bool barrier_passed(uint32 at, int parity) {
    int passed;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.b32 %0, 1, 0, done;\n}"
        : "=r"(passed)
        : "r"(at), "r"(parity)
        : "memory");
    return passed != 0;
}

// ---- what other blocks have written ----

/// Sixteen bytes and four of device memory as of now, past what this unit may remember of them.
DEVICE Word4 load_word_now(const uint16 GLOBAL* from) {
    Word4 word;
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from));
    return word;
}
DEVICE float load_float_now(const float GLOBAL* from) { return bits_float((uint32)load_now((const int GLOBAL*)from)); }

/// A counter in device memory; what was written before others counted may be read after this, by this thread and those that then meet it.
DEVICE uint32 load_acquire(const uint32 GLOBAL* from) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
/// Counts up, past `last` to zero, and says from what: likewise, and whatever this thread and those that it has met wrote before is told
/// to those that count later.
DEVICE uint32 count_up(uint32 GLOBAL* at, uint32 last) {
    uint32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(last) : "memory");
    return before;
}

/// How the second-level cache is to keep what is read once a layer: it goes first, else it would push out what every layer needs again,
/// the kernels' own code among it. The policy that `createpolicy.fractional.L2::evict_first` makes, as a number.
constexpr uint64 READ_ONCE = 0x12F0000000000000;

// ---- copies by lanes ----

/// 16 bytes from device to shared memory, zeros if `valid` is false (the source is then not read). Both 16-byte aligned.
DEVICE void copy16_async_at(uint32 to, uint64 from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
/// Likewise for many copies of few rows: told by a predicate, as an address of its own would be computed for each by a number of bytes.
/// `once` goes by READ_ONCE; `to` must then be in one register: what ptxas makes of a sum of two, one of them the warp's, is an illegal
/// instruction.
template <bool once>
DEVICE void copy16_gathered(uint32 to, uint64 from, bool valid) {
#define IGNORED "{\n.reg .pred ignored;\nsetp.eq.b32 ignored, %2, 0;\n"
    if constexpr (once) {
        asm volatile(IGNORED "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, ignored, %3;\n}" ::"r"(to), "l"(from),
                     "r"((int)valid), "l"(READ_ONCE)
                     : "memory");
    } else {
        asm volatile(IGNORED "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n}" ::"r"(to), "l"(from), "r"((int)valid) : "memory");
    }
#undef IGNORED
}
/// Arrives when all copies that this thread has begun so far have come.
DEVICE void arrive_with_copies(uint32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// ---- bulk tensor copies ----

DEVICE void prefetch(const void GLOBAL* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// Copies the box at (column, row, page); what lies outside the tensor becomes zero and is not read. `once` goes by READ_ONCE.
template <bool once = true>
DEVICE void copy_box(uint32 to, const TensorMap& map, int column, int row, int page, uint32 full) {
    if constexpr (once) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(page), "r"(full), "l"(READ_ONCE)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(page), "r"(full)
            : "memory");
    }
}

/// Asks for such a box, to be near when it is copied.
DEVICE void fetch_box(const TensorMap& map, int column, int row, int page) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(column), "r"(row), "r"(page)
                 : "memory");
}

// ---- matrix products ----

/// Address of shared memory as operands say it: within the block's own, 18 bits. Where blocks are launched in clusters, addresses have
/// the block's rank in its cluster from bit 24 up, which would end up among the operand's strides. All else takes them as they are.
DEVICE uint32 operand_address(uint32 at) { return at & 0x3ffff; }

/// Operand whose rows run along the depth: groups of 8 rows lie 1,024 bytes apart, 16 of depth 32 bytes. It begins `offset` bytes
/// after `at`, both multiples of 16: said apart, constant offsets cost one addition each.
DEVICE uint64 rows_operand(uint32 at, int offset = 0) {
    return (uint64)((at >> 4) + (1 << 16) + offset / 16) | 64ull << 32 | 1ull << 62;
}
/// Operand whose rows are the depth: groups of 8 lie 1,024 bytes apart, units of 64 columns UNIT_BYTES.
template <int unit_bytes>
DEVICE uint64 columns_operand(uint32 at, int offset = 0) {
    return (uint64)((at >> 4) + (unit_bytes >> 4 << 16) + offset / 16) | 64ull << 32 | 1ull << 62;
}

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `pending` groups of this warp are under way.
template <int pending>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// Four matrices of 8 x 8 16-bit values, one row of a matrix at each lane's address.
DEVICE void store_matrix(uint32 at, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/// The same, transposed: a lane's pair lies in one column of the stored matrix.
DEVICE void store_matrix_trans(uint32 at, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

/// Two matrices likewise, at the addresses of the first 16 lanes.
DEVICE void store_matrix_trans(uint32 at, uint32 a, uint32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

/// The inverse of `store_matrix`.
DEVICE void load_matrix_at(uint32* word, uint32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(at)
                 : "memory");
}

/// Four matrices of 8 x 8 16-bit values, transposed: a lane's pair lies in one column of the matrix in memory.
DEVICE void load_matrix_trans(uint32* word, uint32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(at)
                 : "memory");
}

#if Q_DTYPE == 1 || KV_DTYPE == 3  // an 8-bit cache is widened to f16
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif
#define IN_OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IN_OUT_16(d, i) IN_OUT_4(d, i), IN_OUT_4(d, i + 4), IN_OUT_4(d, i + 8), IN_OUT_4(d, i + 12)
#define IN_OUT_32(d, i) IN_OUT_16(d, i), IN_OUT_16(d, i + 16)
#define IN_OUT_64(d, i) IN_OUT_32(d, i), IN_OUT_32(d, i + 32)
#define IN_OUT_128(d, i) IN_OUT_64(d, i), IN_OUT_64(d, i + 64)
#define SUMS_32                                                                                                                      \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, " \
    "%27, %28, %29, %30, %31}"
#define SUMS_128                                                                                                                  \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "   \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "    \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "    \
    "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "    \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "      \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

/// d (64 x 64) += a b, or = where `add` is 0: `a` in registers, `b` by its columns' rows.
DEVICE void product_64_held(float (&d)[32], const uint32* a, uint64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " " SUMS_32 ", {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
        : IN_OUT_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Runs of products in one statement each: the compiler goes through all operands of every statement. Operands in shared memory advance
// in between, by sixteens of bytes.
#define OPERAND(name, at) ".reg .b64 " name ";\nmov.b64 " name ", " at ";\n"
#define ADVANCE(name, by) "add.s64 " name ", " name ", " by ";\n"

/// d (64 x 64) += a b of a unit's depth, or = where `add` is 0: `a` in registers, `b` by its columns' rows.
DEVICE void products_64_held(float (&d)[32], const uint32* a, uint64 b, int add) {
#define PRODUCT(a, add) "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " " SUMS_32 ", {" a "}, b, " add ", 1, 1, 0;\n"
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %49, 0;\n" OPERAND("b", "%48") PRODUCT("%32, %33, %34, %35", "add") ADVANCE("b", "2")
        PRODUCT("%36, %37, %38, %39", "1") ADVANCE("b", "2") PRODUCT("%40, %41, %42, %43", "1") ADVANCE("b", "2")
        PRODUCT("%44, %45, %46, %47", "1") "}"
        : IN_OUT_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]),
          "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "l"(b), "r"(add));
#undef PRODUCT
}

/// d (64 x 64) += a b of three units' depth, both by rows along the depth, units `unit_bytes` apart. If they `come` one by one it waits
/// for a barrier of each, from `full` on, eight bytes apart.
template <int unit_bytes, bool come>
DEVICE void products_64_of_3(float (&d)[32], uint64 a, uint64 b, uint32 full, int parity) {
    static_assert(unit_bytes / 16 - 6 == 506, "as the text says");
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " " SUMS_32 ", a, b, 1, 1, 1, 0, 0;\n"
#define NEXT(by) ADVANCE("a", by) ADVANCE("b", by)
#define UNIT "wgmma.fence.sync.aligned;\n" PRODUCT NEXT("2") PRODUCT NEXT("2") PRODUCT NEXT("2") PRODUCT
#define AWAIT(at, again) \
    again ":\nmbarrier.try_wait.parity.shared::cta.b64 done, [%34 + " at "], %35;\n@!done bra " again ";\n"
    if constexpr (come) {
        asm volatile("{\n.reg .pred done;\n" OPERAND("a", "%32") OPERAND("b", "%33") AWAIT("0", "first") UNIT NEXT("506")
                     AWAIT("8", "second") UNIT NEXT("506") AWAIT("16", "third") UNIT "}"
                     : IN_OUT_32(d, 0)
                     : "l"(a), "l"(b), "r"(full), "r"(parity)
                     : "memory");
    } else {
        asm volatile("{\n" OPERAND("a", "%32") OPERAND("b", "%33") UNIT NEXT("506") UNIT NEXT("506") UNIT "}"
                     : IN_OUT_32(d, 0)
                     : "l"(a), "l"(b)
                     : "memory");
    }
#undef PRODUCT
#undef NEXT
#undef UNIT
#undef AWAIT
}

/// d (64 x 256) += a b of a unit's depth, or = where `add` is 0: `a` in registers, `b` by rows that are the depth.
DEVICE void products_256_held(float (&d)[128], const uint32* a, uint64 b, int add) {
#define PRODUCT(a, add) "wgmma.mma_async.sync.aligned.m64n256k16." WGMMA_TYPES " " SUMS_128 ", {" a "}, b, " add ", 1, 1, 1;\n"
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %145, 0;\n" OPERAND("b", "%144") PRODUCT("%128, %129, %130, %131", "add")
        ADVANCE("b", "128") PRODUCT("%132, %133, %134, %135", "1") ADVANCE("b", "128") PRODUCT("%136, %137, %138, %139", "1")
        ADVANCE("b", "128") PRODUCT("%140, %141, %142, %143", "1") "}"
        : IN_OUT_128(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]),
          "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "l"(b), "r"(add));
#undef PRODUCT
}

/// d (64 x 256) += a b of a unit's depth, or = where `add` is 0: `a` by rows along the depth, `b` by rows that are the depth.
DEVICE void products_256(float (&d)[128], uint64 a, uint64 b, int add) {
#define PRODUCT(add) "wgmma.mma_async.sync.aligned.m64n256k16." WGMMA_TYPES " " SUMS_128 ", a, b, " add ", 1, 1, 0, 1;\n"
#define NEXT ADVANCE("a", "2") ADVANCE("b", "128")
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n" OPERAND("a", "%128") OPERAND("b", "%129") PRODUCT("add")
                 NEXT PRODUCT("1") NEXT PRODUCT("1") NEXT PRODUCT("1") "}"
                 : IN_OUT_128(d, 0)
                 : "l"(a), "l"(b), "r"(add));
#undef PRODUCT
#undef NEXT
}

/// d (64 x 16) += a b, or = where `add` is 0: `a` by rows along the depth or, if `columns`, by rows that are the depth, `b` by
/// its columns' rows.
template <bool columns>
DEVICE void product_keys(float (&d)[8], uint64 a, uint64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, add, 1, 1, %11, 0;\n}"
        : IN_OUT_4(d, 0), IN_OUT_4(d, 4)
        : "l"(a), "l"(b), "r"(add), "n"(int(columns)));
}

/// d (64 x 32) += a b, or = where `add` is 0: `a` by rows along the depth or, if `columns`, by rows that are the depth, `b` by
/// its columns' rows.
template <bool columns>
DEVICE void product_keys(float (&d)[16], uint64 a, uint64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, add, 1, 1, %19, 0;\n}"
        : IN_OUT_16(d, 0)
        : "l"(a), "l"(b), "r"(add), "n"(int(columns)));
}

/// d (64 x 16) += a b, or = where `add` is 0: `a` in registers, `b` by its columns' rows.
DEVICE void product_keys_held(float (&d)[8], const uint32* a, uint64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, add, 1, 1, 0;\n}"
        : IN_OUT_4(d, 0), IN_OUT_4(d, 4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/// d (64 x 32) += a b, or = where `add` is 0: `a` in registers, `b` by its columns' rows.
DEVICE void product_keys_held(float (&d)[16], const uint32* a, uint64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16." WGMMA_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"
        : IN_OUT_16(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
