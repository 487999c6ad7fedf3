// Barriers: the sixteen that have names, and those in shared memory.

#include <algorithm>
#include <vector>

#include "inner.h"

namespace machine {

namespace {

struct Named {
    int threads;
    bool any;
    std::vector<int> came, waiting;
};

/// Eight bytes of shared memory. What was never initialised, or written over, has not the mark.
struct Barrier {
    uint64_t mark : 16, phase : 1, arrivals : 11, pending : 11;
    int64_t bytes : 25;
};
static_assert(sizeof(Barrier) == 8);
constexpr uint64_t MARK = 0xba77;

Named named[16];
std::vector<bool> answer;  // of the threads that waited
std::vector<std::pair<uint32_t, int>> waiting;  // barrier, thread

Barrier& barrier_at(uint32_t at, const char* what) {
    Barrier& barrier = *(Barrier*)shared_at(at, sizeof(Barrier), sizeof(Barrier));
    if (barrier.mark != MARK) fail("%s at %u of shared memory, where no barrier was initialised", what, at);
    return barrier;
}

/// Ends the phase if all has come.
void settle(Barrier& barrier, uint32_t at) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.arrivals;
    for (size_t i = 0; i < waiting.size();) {
        if (waiting[i].first != at) {
            i++;
            continue;
        }
        wake(waiting[i].second);
        waiting[i] = waiting.back();
        waiting.pop_back();
    }
}

void arrive(uint32_t at, int bytes) {
    Barrier& barrier = barrier_at(at, "an arrival");
    if (barrier.pending == 0) fail("too many arrivals in a phase of the barrier at %u, which has %d", at, (int)barrier.arrivals);
    barrier.pending--;
    barrier.bytes += bytes;
    settle(barrier, at);
}

/// Counts the running thread at a barrier; whether all have come, who are then told whether any said so, and go on.
bool came(int name, int threads, bool condition) {
    if (name < 0 || name > 15 || (threads % WARP != 0 && name != 0)) fail("no barrier of name %d for %d threads", name, threads);
    Named& barrier = named[name];
    if (barrier.came.empty()) {
        barrier.threads = threads;
        barrier.any = false;
    }
    if (barrier.threads != threads) fail("barrier %d is for %d threads, others say %d", name, threads, barrier.threads);
    barrier.any |= condition;
    barrier.came.push_back(here.thread);
    if ((int)barrier.came.size() < threads) return false;
    std::vector<int> lanes(here.threads / WARP + 1);
    for (int thread : barrier.came) lanes[thread / WARP]++;
    for (int warp = 0; warp < (int)lanes.size(); warp++) {
        int all = std::min(WARP, here.threads - warp * WARP);
        if (lanes[warp] != 0 && lanes[warp] != all) fail("barrier %d: %d threads of warp %d have come", name, lanes[warp], warp);
    }
    for (int thread : barrier.waiting) {
        answer[thread] = barrier.any;
        wake(thread);
    }
    barrier.came.clear();
    barrier.waiting.clear();
    return true;
}

}  // namespace

void reset_barriers(int threads) {
    for (Named& barrier : named) barrier = {};
    answer.assign(threads, false);
    waiting.clear();
}

bool named_barrier(int name, int threads, bool condition) {
    if (came(name, threads, condition)) return named[name].any;
    named[name].waiting.push_back(here.thread);
    suspend(name == 0 ? "at the block's barrier" : "at a named barrier");
    return answer[here.thread];
}

void named_arrive(int name, int threads) { came(name, threads, false); }

void barrier_init(uint32_t at, int arrivals) {
    Barrier& barrier = *(Barrier*)shared_at(at, sizeof(Barrier), sizeof(Barrier));
    barrier.mark = MARK;
    barrier.phase = 0;
    barrier.arrivals = barrier.pending = arrivals;
    barrier.bytes = 0;
}

void barrier_arrive(uint32_t at) {
    maybe_pause();
    arrive(at, 0);
}

void barrier_expect(uint32_t at, int bytes) {
    maybe_pause();
    arrive(at, bytes);
}

void barrier_arrived(uint32_t at) { arrive(at, 0); }

void barrier_complete(uint32_t at, int bytes) {
    Barrier& barrier = barrier_at(at, "a copy ends");
    barrier.bytes -= bytes;
    settle(barrier, at);
}

void barrier_wait(uint32_t at, int parity) {
    maybe_pause();
    while (barrier_at(at, "a wait").phase == (parity & 1)) {
        waiting.push_back({at, here.thread});
        suspend("at a barrier in shared memory");
    }
}

bool barrier_passed(uint32_t at, int parity) {
    maybe_pause();
    return barrier_at(at, "a test").phase != (parity & 1);
}

}  // namespace machine
