// How the rows form writes a sequence's result: rows as they are, by way of shared memory. A partial one it writes as lanes have it.

constexpr int HALF = KV_LORA_RANK / 2;  // columns that a side sums up

/// This warp's rows of a sequence's result, HALF columns, a row's 16-byte words in neighbouring lanes.
struct Output {
    Word4 word[16];

    /// Gathers it by way of the warp's rows of `staging`.
    DEVICE void gather(const float (&o)[128], const float (&scale)[2], unsigned char SHARED* staging) {
        constexpr int ROW_BYTES = HALF * 2;
        constexpr int WINDOW = 8;  // words whose order a row's number changes
        int lane = unhoisted(lane_index());
        staging += warp_of_group() * 16 * ROW_BYTES;
        uint32 to = shared_address(staging) + lane % 16 * ROW_BYTES;
        UNROLL for (int w = 0; w < WINDOW; w += 2) {
            uint32 at = to + ((w + lane / 16) ^ lane % 8) * 16;
            UNROLL for (int window = 0; window < ROW_BYTES / 16; window += WINDOW) {
                const float* x = o + (window + w) * 4;
                uint32 words[4];
                UNROLL for (int i = 0; i < 4; i++) words[i] = pack(x[2 * i] * scale[i % 2], x[2 * i + 1] * scale[i % 2]);
                store_matrix(at + window * 16, words[0], words[1], words[2], words[3]);
            }
        }
        warp_barrier();
        // A row that saw nothing, which is rare, is zero even beside values that are not finite.
        if (unlikely(warp_any(scale[0] == 0.0f || scale[1] == 0.0f))) {
            NO_UNROLL for (int w = lane % 4; w < ROW_BYTES / 16; w += 4) {
                unsigned char SHARED* row = staging + lane / 4 * ROW_BYTES + w * 16;
                UNROLL for (int r = 0; r < 2; r++) {
                    if (scale[r] == 0.0f) *(Word4 SHARED*)(row + r * 8 * ROW_BYTES) = {0, 0, 0, 0};
                }
            }
            warp_barrier();
        }
        UNROLL for (int r = 0; r < 16; r++) word[r] = *(const Word4 SHARED*)(staging + r * ROW_BYTES + (lane ^ r % 8) * 16);
        warp_barrier();
    }

    DEVICE void write(const DecodeParams& p, int seq, int first_row, int column) const {
        int lane = unhoisted(lane_index());
        Row row = row_of(p, seq, first_row + lane % 16);
        uint64 to = row.valid ? (uint64)(output_row(p, row) + column) : 0;
        bool aligned = !warp_any(to % 16 != 0);
        UNROLL for (int r = 0; r < 16; r++) {
            uint64 at = from_lane(to, r);
            if (at != 0) store_output(global_pointer<uint16>(at) + lane * 8, word[r], aligned);
        }
    }
};
