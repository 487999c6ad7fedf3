// A tensor map as the emulated driver encodes it: a tensor of three dimensions, and boxes of it whose rows have 128 bytes.
#pragma once

#include <cstdint>

namespace machine {

struct TensorMap {
    uint64_t mark, address;
    uint64_t row_bytes, page_bytes;      // strides
    int64_t columns, rows, pages;
    int32_t box_rows, element_bytes;
};
static_assert(sizeof(TensorMap) <= 128);
constexpr uint64_t TENSOR_MAP_MARK = 0x70616d726f736e65;
constexpr int BOX_ROW_BYTES = 128;

}  // namespace machine
