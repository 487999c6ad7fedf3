// Stage 1 of MLA decode for Hopper by whichever of two forms serves a step: few tokens of one sequence as few_block.h describes, more
// as rows_block.h does. A graph that is captured for any length then costs a short sequence no second kernel.

static_assert(BLOCK_ROWS == ROWS && few::WORKERS + WAVE <= THREADS, "blocks serve both");
static_assert(few::SHARED_BYTES <= BARRIERS_AT, "barriers of one are beyond what the other uses");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select_few.rs counts the same");
#endif

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    // Each form calls shared memory by a name of its own: what one computes from it for single lanes the other would have to use for
    // operands of products, which must be the same in a warp.
    SHARED_MEMORY_1024(rows_shared);
    if (thread_index() == THREADS - WAVE) prepare(latent, rope, rows_shared);
    // The same in all lanes, which the compiler knows of a vote only.
    if (warp_any(few::serve(p, latent, rope))) return;
    barrier();
    serve(p, latent, rope, rows_shared);
}
