// Asynchronous copies: of lanes, and of boxes of a tensor.

#include <cstring>
#include <deque>
#include <vector>

#include "inner.h"
#include "tensor_map.h"

namespace machine {

namespace {

constexpr int CHUNK = 16;

/// Copies under way to each 16 bytes of dynamic shared memory: how many, and who began the last.
struct UnderWay {
    uint16_t count, thread;
};
std::vector<UnderWay> under_way;

void count(uint32_t to, size_t bytes, int by) {
    to = without_rank(to);
    for (size_t chunk = to / CHUNK; chunk < (to + bytes) / CHUNK; chunk++) {
        if (chunk >= under_way.size()) under_way.resize(chunk + 1);
        under_way[chunk].count += by;
        under_way[chunk].thread = here.thread;
    }
}

struct Copy {
    uint32_t to;
    const void* from;
    bool valid;

    void land() const {
        unsigned char* place = shared_at(to, 16, 16);
        valid ? memcpy(place, from, 16) : memset(place, 0, 16);
        count(to, 16, -1);
    }
};

/// Copies of a thread, in order; those before `landed` have come.
struct Copies {
    std::deque<Copy> waiting;
    uint64_t issued, landed;
    std::deque<uint64_t> groups;  // copies issued when each was closed

    void land_until(uint64_t count) {
        for (; landed < count; landed++) {
            waiting.front().land();
            waiting.pop_front();
        }
    }
};
std::vector<Copies> copies;

Copies& own() { return copies[here.thread]; }

/// Bits 4 to 6 of an address in shared memory are changed by bits 7 to 9.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

}  // namespace

void reset_copies(int threads) {
    copies.assign(threads, {});
    under_way.clear();
}

unsigned char* settled_at(uint32_t address, size_t bytes, size_t alignment) {
    uint32_t own = without_rank(address);
    for (size_t chunk = own / CHUNK; chunk * CHUNK < own + bytes && chunk < under_way.size(); chunk++) {
        if (under_way[chunk].count == 0) continue;
        fail("uses %u of shared memory, to where a copy of thread %d is under way", own, under_way[chunk].thread);
    }
    return shared_at(address, bytes, alignment);
}

void copy16(uint32_t to, const void* from, bool valid) {
    if ((uintptr_t)from % 16 != 0 && valid) fail("a copy of 16 bytes from %p", from);
    own().waiting.push_back({to, from, valid});
    shared_at(to, 16, 16);
    own().issued++;
    count(to, 16, 1);
    if (chance(16) == 0) own().land_until(own().issued);
}

void copy_commit() { own().groups.push_back(own().issued); }

void copy_wait(int pending) {
    std::deque<uint64_t>& groups = own().groups;
    while ((int)groups.size() > pending) {
        own().land_until(groups.front());
        groups.pop_front();
    }
}

void arrive_with_copies(uint32_t at) {
    uint64_t count = own().issued;
    later(true, [at, count] {
        own().land_until(count);
        barrier_arrived(at);
    });
}

void copy_box(uint32_t to, const void* described, int column, int row, int page, uint32_t full) {
    maybe_pause();
    TensorMap map;
    memcpy(&map, described, sizeof map);
    if (map.mark != TENSOR_MAP_MARK) fail("a copy by something that is no tensor map");
    shared_at(to, (size_t)map.box_rows * BOX_ROW_BYTES, BOX_ROW_BYTES);
    count(to, (size_t)map.box_rows * BOX_ROW_BYTES, 1);
    later(true, [=] {
        int64_t inside = (map.columns - column) * map.element_bytes;  // bytes of a row that lie in the tensor
        inside = inside < 0 || column < 0 ? 0 : inside < BOX_ROW_BYTES ? inside : BOX_ROW_BYTES;
        for (int i = 0; i < map.box_rows; i++) {
            unsigned char line[BOX_ROW_BYTES] = {};
            int64_t at = (int64_t)row + i;
            if (page >= 0 && page < map.pages && at >= 0 && at < map.rows) {
                memcpy(line, (const char*)map.address + page * map.page_bytes + at * map.row_bytes + column * map.element_bytes, inside);
            }
            for (int chunk = 0; chunk < BOX_ROW_BYTES; chunk += 16) {
                memcpy(shared_at(swizzled(to + i * BOX_ROW_BYTES + chunk), 16, 16), line + chunk, 16);
            }
        }
        count(to, (size_t)map.box_rows * BOX_ROW_BYTES, -1);
        barrier_complete(full, map.box_rows * BOX_ROW_BYTES);
    });
}

}  // namespace machine
