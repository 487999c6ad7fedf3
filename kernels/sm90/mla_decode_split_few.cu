// Stage 1 of MLA decode for few tokens on Hopper, as few_block.h describes it.

#ifdef SPLIT_SHARED_BYTES
static_assert(few::SHARED_BYTES == SPLIT_SHARED_BYTES, "select_few.rs counts the same");
#endif

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    few::prepare(p, latent, rope);
    barrier();
    few::serve(p, latent, rope, true);
}
