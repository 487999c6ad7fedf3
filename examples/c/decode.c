/* Decode attention from C: two sequences over paged memory, checked against the formula written out below; then a session, whose
 * graph is replayed with other lengths.
 *
 *   cc -Iinclude examples/c/decode.c -Ltarget/release -Wl,-rpath,"$PWD/target/release" -llatentwave -lm -o target/decode
 *
 * It runs on the host, where "device memory" is ordinary memory. On a GPU take LW_CUDA or LW_ROCM, bf16 tensors in device memory, and
 * a cudaStream_t or hipStream_t as the stream: nothing else changes. */
#include <latentwave.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, HEADS = 4, LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE, PAGE = 16, PAGES = 8, TABLE = 4 };

static float q[BATCH * HEADS * WIDTH], cache[PAGES * PAGE * WIDTH], out[BATCH * HEADS * LATENT], lse[BATCH * HEADS];
static const int32_t table[BATCH * TABLE] = {5, 2, 7, 0, 1, -1, -1, -1}; /* What lies behind a sequence's pages may be anything. */

static void check(lw_status status, const char *call) {
    if (status == LW_OK) return;
    fprintf(stderr, "%s: %s: %s\n", call, lw_status_name(status), lw_last_error());
    exit(1);
}

/* Numbers from -1 to 1. */
static float number(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1.0f;
}

/* Largest difference of outputs and LSE from softmax(scale * q k) v in double precision. */
static double error(const int32_t *seq_lens, double scale) {
    double worst = 0.0;
    for (int row = 0; row < BATCH * HEADS; row++) {
        int seq = row / HEADS, len = seq_lens[seq];
        double logits[TABLE * PAGE], sum = 0.0, sums[LATENT] = {0}, largest = -INFINITY;
        for (int token = 0; token < len; token++) {
            const float *key = cache + (table[seq * TABLE + token / PAGE] * PAGE + token % PAGE) * WIDTH;
            double dot = 0.0;
            for (int i = 0; i < WIDTH; i++) dot += (double)q[row * WIDTH + i] * key[i];
            logits[token] = dot * scale;
            if (logits[token] > largest) largest = logits[token];
        }
        for (int token = 0; token < len; token++) {
            const float *key = cache + (table[seq * TABLE + token / PAGE] * PAGE + token % PAGE) * WIDTH;
            double weight = exp(logits[token] - largest);
            sum += weight;
            for (int i = 0; i < LATENT; i++) sums[i] += weight * key[i];
        }
        for (int i = 0; i < LATENT; i++) worst = fmax(worst, fabs(sums[i] / sum - out[row * LATENT + i]));
        worst = fmax(worst, fabs(log(sum) + largest - lse[row]));
    }
    return worst;
}

/* The engine's whole step: here nothing but one attention layer. */
static int32_t enqueue(void *user, lw_step *step) {
    return lw_step_decode(step, user);
}

int main(void) {
    if (lw_abi_version() != LW_ABI_VERSION) {
        fprintf(stderr, "header and library do not fit\n");
        return 1;
    }
    lw_device *device;
    check(lw_device_open(LW_HOST, 0, &device), "lw_device_open");
    lw_device_info info = {.struct_size = sizeof info};
    check(lw_device_get_info(device, &info), "lw_device_get_info");
    printf("latentwave %s on %s (%s)\n", lw_version(), info.name, info.arch);

    for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = number();
    for (size_t i = 0; i < sizeof cache / sizeof *cache; i++) cache[i] = number();

    const lw_layer layer = {
        .num_heads = HEADS,
        .kv_lora_rank = LATENT,
        .qk_rope_head_dim = ROPE,
        .page_size = PAGE,
        .q_dtype = LW_F32,
        .kv_dtype = LW_F32,
        .sm_scale = 1.0f / sqrtf(192.0f),
    };
    int32_t seq_lens[BATCH] = {50, 7};
    lw_decode_args args = {
        .struct_size = sizeof args,
        .layer = layer,
        .cache = {.kv = cache, .num_pages = PAGES},
        .batch = BATCH,
        .query_len = 1,
        .max_seq_len = TABLE * PAGE,
        .table_width = TABLE,
        .q = q,
        .block_table = table,
        .seq_lens = seq_lens,
        .out = out,
        .lse = lse,
    };
    check(lw_decode_workspace_bytes(device, &args, &args.workspace_bytes), "lw_decode_workspace_bytes");
    args.workspace = malloc(args.workspace_bytes);
    check(lw_decode(device, &args, NULL), "lw_decode");
    double worst = error(seq_lens, layer.sm_scale);
    printf("lw_decode: largest error %.1e\n", worst);

    /* A call that cannot be is an error that names the argument. */
    lw_decode_args wrong = args;
    wrong.layer.page_size = 0;
    if (lw_decode(device, &wrong, NULL) != LW_ERROR_ARGUMENT) return 1;
    printf("refused: %s\n", lw_last_error());

    const lw_session_config config = {
        .struct_size = sizeof config,
        .layer = layer,
        .max_num_seqs = BATCH,
        .max_seq_len = TABLE * PAGE,
        .num_pages = PAGES,
    };
    lw_session *session;
    check(lw_session_create(device, &config, &session), "lw_session_create");
    lw_step_decode_args layers = {.struct_size = sizeof layers, .cache = args.cache, .q = q, .out = out, .lse = lse};
    lw_capture_report captured = {.struct_size = sizeof captured};
    check(lw_session_capture(session, enqueue, &layers, &captured), "lw_session_capture");
    for (int round = 0; round < 3; round++) {
        seq_lens[0] += 1;
        seq_lens[1] += 3;
        memset(out, 0xff, sizeof out);
        const lw_step_batch batch = {
            .struct_size = sizeof batch,
            .num_seqs = BATCH,
            .query_len = 1,
            .seq_lens = seq_lens,
            .block_table = table,
            .table_width = TABLE,
        };
        lw_step_report report = {.struct_size = sizeof report};
        check(lw_session_step(session, &batch, enqueue, &layers, &report), "lw_session_step");
        check(lw_session_synchronize(session), "lw_session_synchronize");
        if (report.mode != LW_GRAPH_FULL) return 1;
        worst = fmax(worst, error(seq_lens, layer.sm_scale));
    }
    printf("lw_session_step: %d graphs, largest error %.1e\n", (int)captured.num_captured, worst);

    lw_session_close(session);
    lw_device_close(device);
    free(args.workspace);
    return worst < 1e-4 ? 0 : 1;
}
