// Stage 1 of MLA decode for Hopper by whichever of two forms serves a step: few tokens of one sequence as few_block.h describes, more
// as rows_block.h does. A graph that is captured for any length then costs a short sequence no second kernel.
//
// Lengths choose, which stand from a step's second layer on: the first one waits for them. The paths do not meet again, and the forms
// call shared memory by names of their own: of what serves both the compiler makes what is slow for one.

static_assert(BLOCK_ROWS == ROWS && few::WORKERS + WAVE <= THREADS, "blocks serve both");
static_assert(SHARED_BYTES <= few::LENGTHS_AT, "what chooses lies beyond the rows form's");
#ifdef SPLIT_SHARED_BYTES
static_assert(few::SHARED_BYTES == SPLIT_SHARED_BYTES, "select_few.rs counts the same");
#endif

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(rows_shared);
    if (thread_index() == THREADS - WAVE) prepare(latent, rope, rows_shared);
    if (!p.settled) take_turn();
    few::prepare(p, latent, rope);
    barrier();
    if (few::are_noted_few(p)) {
        few::serve(p, latent, rope, !p.settled);
        return;
    }
    serve(p, latent, rope, rows_shared, !p.settled);
}
