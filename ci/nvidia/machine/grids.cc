// A kernel that may begin before those before it have ended: what it sees of device memory until it waits for them.
//
// At its earliest it is shown nothing of what it has not waited for: each block begins over memory as it was before the kernel ahead began,
// or before those that this one was let go ahead of, too, and only when none of its threads can go on does memory become what they have
// made of it.

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include "inner.h"

namespace machine {

namespace {

constexpr size_t CHUNK = 64, PAGE = 4096;
constexpr size_t MOST_WATCHED = 64 << 20;  // with more device memory, kernels begin one after the other
constexpr uint64_t AT_LAST = 1 << 18;      // ticks, for a block that asks again and again whether something has come

using Bytes = std::array<unsigned char, CHUNK>;

/// What may be unwritten when the grid begins: places, and what is there before.
std::map<unsigned char*, Bytes> earlier;
const void* last_order;  // in which the last kernel was launched

// Of the grid under way.
bool overlaps, watched;
bool has_waited, some_let_go, all_let_go_early;
std::vector<Memory> spans;
std::vector<unsigned char> copies;  // of all device memory when it began

// Of its block.
bool is_earlier;
bool has_passed, has_let_go, let_go_early;
uint64_t catches_up_at;
std::vector<Bytes> now;
std::vector<int> waiting;

/// What the grid has written, each with what was there before.
std::map<unsigned char*, Bytes> written() {
    std::map<unsigned char*, Bytes> changed;
    const unsigned char* copy = copies.data();
    for (const Memory& span : spans) {
        for (size_t at = 0; at < span.bytes; at += PAGE) {
            size_t end = std::min(at + PAGE, span.bytes);
            if (memcmp(span.at + at, copy + at, end - at) == 0) continue;  // most are as they were
            for (size_t chunk = at; chunk < end; chunk += CHUNK) {
                if (memcmp(span.at + chunk, copy + chunk, CHUNK) == 0) continue;
                memcpy(changed[span.at + chunk].data(), copy + chunk, CHUNK);
            }
        }
        copy += span.bytes;
    }
    return changed;
}

}  // namespace

std::recursive_mutex one_grid_at_a_time;

void grids_apart() {
    std::lock_guard lock(one_grid_at_a_time);
    earlier.clear();
    last_order = nullptr;
}

void begin_grid(const void* order, bool may_overlap) {
    if (order != last_order || !may_overlap) earlier.clear();
    overlaps = may_overlap && order == last_order;
    last_order = order;
    has_waited = some_let_go = false;
    all_let_go_early = true;
    spans = device_memory();
    size_t bytes = 0;
    for (const Memory& span : spans) bytes += span.bytes;
    watched = order && bytes <= MOST_WATCHED;
    if (!watched) return earlier.clear();
    copies.resize(bytes);
    unsigned char* copy = copies.data();
    for (const Memory& span : spans) copy = (unsigned char*)memcpy(copy, span.at, span.bytes) + span.bytes;
}

void begin_block() {
    has_passed = has_let_go = let_go_early = false;
    waiting.clear();
    is_earlier = !earlier.empty();
    if (!is_earlier) return;
    catches_up_at = chance(4) == 0 ? chance(1 << 12) : AT_LAST;
    now.resize(earlier.size());
    size_t i = 0;
    for (auto& [at, before] : earlier) {
        memcpy(now[i++].data(), at, CHUNK);
        memcpy(at, before.data(), CHUNK);
    }
}

bool catch_up(uint64_t tick) {
    if (!is_earlier || tick < catches_up_at) return false;
    is_earlier = false;
    size_t i = 0;
    for (auto& [at, before] : earlier) {
        const Bytes& after = now[i++];
        for (size_t byte = 0; byte < CHUNK; byte++) {
            if (at[byte] == before[byte]) {
                at[byte] = after[byte];
            } else if (after[byte] == before[byte]) {
                before[byte] = at[byte];  // its own, beside what those before it write: as it is for the next block
            } else if (after[byte] != at[byte]) {
                fail("the block writes at %p, as kernels before it do, and has not waited for them", (void*)(at + byte));
            }
        }
    }
    for (int thread : waiting) wake(thread);
    has_passed |= !waiting.empty();
    return !waiting.empty();
}

void end_block() {
    catch_up(UINT64_MAX);
    some_let_go |= has_let_go;
    all_let_go_early &= let_go_early;
}

void end_grid() {
    // The kernel after this one waits for this one alone.
    if (overlaps && !has_waited) fail("ends, and has not waited for the kernels before it");
    if (!watched) return;
    if (!some_let_go) return earlier.clear();
    auto changed = written();
    if (!all_let_go_early) {
        earlier = std::move(changed);
    } else {
        earlier.merge(changed);  // what was there earlier still stays
    }
}

void grid_wait() {
    has_waited = true;
    if (!is_earlier) {
        has_passed = true;
        return;
    }
    waiting.push_back(here.thread);
    suspend("griddepcontrol.wait");
}

void grid_let_go() {
    if (has_let_go) return;
    has_let_go = true;
    let_go_early = !has_passed;
}

}  // namespace machine
