// Stage 1 of MLA decode for Hopper by 64 query rows a block, as rows_block.h describes it.

#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select_sm90.rs counts the same");
#endif

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(shared);
    if (thread_index() == PREPARING_WARP * WAVE) prepare(latent, rope, shared);
    serve(p, latent, rope, shared, false);
}
