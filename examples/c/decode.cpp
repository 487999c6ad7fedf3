// Decode attention from C++17: the new token's row is written into its page, then attended to; handles close themselves.
//
//   c++ -std=c++17 -Iinclude examples/c/decode.cpp -Ltarget/release -Wl,-rpath,"$PWD/target/release" -llatentwave -o target/decode_cpp
#include <latentwave.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

static void check(lw_status status) {
    if (status != LW_OK) throw std::runtime_error(lw_last_error());
}

struct Close {
    void operator()(lw_device *device) const { lw_device_close(device); }
};

int main() try {
    constexpr int heads = 2, latent = 512, rope = 64, width = latent + rope, page_size = 16, pages = 3, len = 20;

    lw_device *opened = nullptr;
    check(lw_device_open(LW_HOST, 0, &opened));
    std::unique_ptr<lw_device, Close> device(opened);

    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    auto draw = [&](size_t count) {
        std::vector<float> numbers(count);
        std::generate(numbers.begin(), numbers.end(), [&] { return normal(random); });
        return numbers;
    };
    auto q = draw(heads * width), cache = draw(pages * page_size * width), kv_c = draw(latent), k_pe = draw(rope);
    std::vector<float> out(heads * latent), lse(heads);
    const std::vector<int32_t> table = {2, 0}, seq_lens = {len};
    const std::vector<int64_t> slots = {0 * page_size + (len - 1) % page_size};

    lw_layer layer{};
    layer.num_heads = heads;
    layer.kv_lora_rank = latent;
    layer.qk_rope_head_dim = rope;
    layer.page_size = page_size;
    layer.q_dtype = layer.kv_dtype = LW_F32;
    layer.sm_scale = 1.0f / std::sqrt(192.0f);
    lw_kv_cache kv_cache{};
    kv_cache.kv = cache.data();
    kv_cache.num_pages = pages;

    lw_cache_write_args write{};
    write.struct_size = sizeof write;
    write.layer = layer;
    write.cache = kv_cache;
    write.num_tokens = 1;
    write.kv_c = kv_c.data();
    write.k_pe = k_pe.data();
    write.slot_mapping = slots.data();
    check(lw_cache_write(device.get(), &write, nullptr));

    lw_decode_args args{};
    args.struct_size = sizeof args;
    args.layer = layer;
    args.cache = kv_cache;
    args.batch = args.query_len = 1;
    args.max_seq_len = len;
    args.table_width = static_cast<int64_t>(table.size());
    args.q = q.data();
    args.block_table = table.data();
    args.seq_lens = seq_lens.data();
    args.out = out.data();
    args.lse = lse.data();
    check(lw_decode_workspace_bytes(device.get(), &args, &args.workspace_bytes));
    std::vector<char> workspace(args.workspace_bytes);
    args.workspace = workspace.data();
    check(lw_decode(device.get(), &args, nullptr));

    // softmax(scale * q k) v in double precision; the last row is the one just written.
    auto key = [&](int token, int i) -> double {
        if (token == len - 1) return i < latent ? kv_c[i] : k_pe[i - latent];
        return cache[(table[token / page_size] * page_size + token % page_size) * width + i];
    };
    double worst = 0.0;
    for (int head = 0; head < heads; head++) {
        std::vector<double> logits(len), sums(latent);
        for (int token = 0; token < len; token++) {
            for (int i = 0; i < width; i++) logits[token] += q[head * width + i] * key(token, i);
            logits[token] *= layer.sm_scale;
        }
        const double largest = *std::max_element(logits.begin(), logits.end());
        double sum = 0.0;
        for (int token = 0; token < len; token++) {
            const double weight = std::exp(logits[token] - largest);
            sum += weight;
            for (int i = 0; i < latent; i++) sums[i] += weight * key(token, i);
        }
        for (int i = 0; i < latent; i++) worst = std::max(worst, std::abs(sums[i] / sum - out[head * latent + i]));
        worst = std::max(worst, std::abs(std::log(sum) + largest - lse[head]));
    }
    std::printf("lw_cache_write, lw_decode: largest error %.1e\n", worst);
    return worst < 1e-4 ? 0 : 1;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
