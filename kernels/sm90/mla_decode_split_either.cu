// Stage 1 of MLA decode for Hopper by whichever of two forms serves a step: few tokens of one sequence as few_block.h describes, more
// as rows_block.h does. A graph that is captured for any length then costs a short sequence no second kernel.
//
// The forms call shared memory by names of their own: what one computes from it for single lanes the other would have to use for
// operands of products, which must be the same in a warp. What chooses is small, and comes before either's code.

static_assert(BLOCK_ROWS == ROWS && few::WORKERS + WAVE <= THREADS, "blocks serve both");
static_assert(SHARED_BYTES <= few::LENGTHS_AT, "what chooses lies beyond the rows form's");
#ifdef SPLIT_SHARED_BYTES
static_assert(few::SHARED_BYTES == SPLIT_SHARED_BYTES, "select_few.rs counts the same");
#endif

/// Whether the plan kernel has left the step's work to the schedule. It has left some to the first part then.
DEVICE bool is_scheduled(const DecodeParams& p) {
    const int GLOBAL* first = schedule_of(p).parts;
    return warp_any((load_now(first + 2) | load_now(first + 3)) != 0);
}

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(rows_shared);
    few::prepare(p, latent, rope);
    if (thread_index() == THREADS - WAVE) prepare(latent, rope, rows_shared);
    barrier();
    bool noted = few::are_noted_few(p);
    bool few = noted;
    if (!noted) {
        grid_dependency_wait();
        grid_dependency_launch();
        few = !p.settled && !is_scheduled(p);  // lengths stand from a step's second layer on
    }
    if (warp_any(few && few::serve(p, latent, rope, noted))) return;
    barrier();  // after which warps are known to be whole, too: else the loader's registers do not suffice
    serve(p, latent, rope, rows_shared);
}
