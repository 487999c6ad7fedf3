// Threads of a block as coroutines, and their meetings.

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "inner.h"

#ifndef __x86_64__
#error "threads are switched in x86-64's assembler"
#endif

// Saves the registers that a call preserves, and goes on with another stack.
extern "C" void machine_switch(void** from, void* to);
asm(R"(
.globl machine_switch
machine_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace machine {

Here here;

namespace {

constexpr size_t STACK = 256 << 10, GUARD = 4096;

struct Thread {
    void* stack_pointer;
    const char* why;  // it waits; null once it has ended
};

struct Meeting {
    const char* what;
    int came;
    void* given[WARP];
    Action action;
};

// Of the grid under way, and of its block.
const Entry* entry;
void* const* parameters;
const char* kernel = "";
thread_local bool is_running = false;
std::vector<Thread> threads;
std::vector<int> ready;
std::vector<Meeting> meetings;
std::vector<Later> tasks;
uint64_t tick, next_due;
uint32_t late_one_in;  // a block of which little is late finds other faults than one of which much is
int ended;
void* host_stack;

uint64_t random_state;

unsigned char* stack_of(int thread) {
    static std::vector<unsigned char*> stacks;
    while ((int)stacks.size() <= thread) {
        void* map = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map == MAP_FAILED) fail("no memory for the threads' stacks");
        mprotect(map, GUARD, PROT_NONE);
        stacks.push_back((unsigned char*)map);
    }
    return stacks[thread] + STACK;
}

void do_task(size_t index) {
    Later task = std::move(tasks[index]);
    tasks[index] = std::move(tasks.back());
    tasks.pop_back();
    int running = here.thread;
    here.thread = task.thread;
    task.act();
    here.thread = running;
}

void do_due_tasks() {
    for (size_t i = 0; i < tasks.size();) tasks[i].due <= tick ? do_task(i) : void(i++);
    next_due = UINT64_MAX;
    for (const Later& task : tasks) next_due = std::min(next_due, task.due);
}

[[noreturn]] void deadlock() {
    std::map<std::string, std::pair<int, int>> waiting;  // how many, and the first
    for (int i = 0; i < here.threads; i++) {
        std::string what = "warps " + std::to_string(i / 128 * 4) + " to " + std::to_string(i / 128 * 4 + 3) + ": " +
                           (threads[i].why ? threads[i].why : "ended");
        waiting.emplace(what, std::pair(0, i)).first->second.first++;
    }
    std::string all;
    for (auto& [what, who] : waiting) {
        all += "\n  " + what + ", " + std::to_string(who.first) + " threads from " + std::to_string(who.second) + " on";
    }
    fail("every thread waits:%s", all.c_str());
}

/// The next thread to go on; tasks that are due are done before.
int choose() {
    tick++;
    if (tick >= next_due) do_due_tasks();
    catch_up(tick);
    while (ready.empty()) {
        if (!tasks.empty()) {
            do_task(chance((uint32_t)tasks.size()));
        } else if (!catch_up(UINT64_MAX)) {
            deadlock();
        }
    }
    size_t index = chance((uint32_t)ready.size());
    int thread = ready[index];
    ready[index] = ready.back();
    ready.pop_back();
    return thread;
}

[[noreturn]] void thread_main() {
    entry->call(parameters);
    threads[here.thread].why = nullptr;
    void* unused;
    if (++ended == here.threads) {
        machine_switch(&unused, host_stack);
    } else {
        here.thread = choose();
        machine_switch(&unused, threads[here.thread].stack_pointer);
    }
    abort();
}

void run_block(uint64_t seed) {
    random_state = seed * 0x9e3779b97f4a7c15u | 1;
    for (int i = 0; i < 4; i++) chance(2);
    tick = 0;
    late_one_in = 4 << 2 * chance(4);
    next_due = UINT64_MAX;
    ended = 0;
    tasks.clear();
    threads.assign(here.threads, {});
    meetings.assign((here.threads + WARP - 1) / WARP, {});
    ready.resize(here.threads);
    std::iota(ready.begin(), ready.end(), 0);
    for (int i = 0; i < here.threads; i++) {
        // As after a call: the stack pointer is a multiple of 16 less 8 where a function begins.
        void** top = (void**)stack_of(i) - 1;
        *--top = (void*)thread_main;
        threads[i] = {top - 6, "running"};
        memset(threads[i].stack_pointer, 0, 6 * sizeof(void*));
    }
    begin_block();
    here.thread = choose();
    machine_switch(&host_stack, threads[here.thread].stack_pointer);
    end_block();
    for (const Later& task : tasks) {
        here.thread = task.thread;
        if (task.required) fail("a copy is under way when the block ends");
    }
    check_products();
    check_shared();
}

/// A number of the environment's, which is 1 if it has none.
uint64_t setting(const char* name) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : 1;
}

bool delays() {
    static const bool delays = setting("NVIDIA_EMULATOR_DELAYS") != 0;
    return delays;
}

}  // namespace

bool running() { return is_running; }

void fail(const char* format, ...) {
    static char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (is_running) {
        fprintf(stderr, "\nemulated device: %s, block %d of %d, thread %d of %d: %s\n", kernel, here.block, here.blocks, here.thread,
                here.threads, text);
    } else {
        fprintf(stderr, "\nemulated device: %s\n", text);
    }
    abort();
}

uint32_t chance(uint32_t bound) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) * bound >> 32);
}

void wake(int thread) { ready.push_back(thread); }

void suspend(const char* why) {
    int self = here.thread;
    threads[self].why = why;
    int next = choose();
    here.thread = next;
    if (next != self) machine_switch(&threads[self].stack_pointer, threads[next].stack_pointer);
    threads[self].why = "running";
}

void maybe_pause() {
    if (chance(8) != 0) return;
    wake(here.thread);
    suspend("running");
}

void later(bool required, std::function<void()> act) {
    // A tile takes tens of thousands of ticks. What is late may take until nothing else can happen.
    bool is_late = delays() && chance(late_one_in) == 0;
    uint64_t due = !is_late ? tick + chance(256) : chance(4) == 0 ? tick + chance(1 << 15) : UINT64_MAX;
    next_due = std::min(next_due, due);
    tasks.push_back({due, here.thread, required, std::move(act)});
}

void meet(const char* what, void* given, Action action) {
    int warp = here.thread / WARP;
    int lanes = std::min(WARP, here.threads - warp * WARP);
    Meeting& meeting = meetings[warp];
    if (meeting.came == 0) {
        meeting.what = what;
        meeting.action = action;
    } else if (meeting.what != what && strcmp(meeting.what, what) != 0) {
        fail("%s, but other lanes of the warp meet for %s", what, meeting.what);
    }
    meeting.given[lane()] = given;
    if (++meeting.came < lanes) return suspend(what);
    meeting.came = 0;
    action(meeting.given, lanes);
    for (int i = 0; i < lanes; i++) {
        if (i != lane()) wake(warp * WARP + i);
    }
}

void run(const Entry& of, const char* name, const Shape& shape, void* const* given) {
    static uint64_t launches = 0;
    std::lock_guard lock(one_grid_at_a_time);
    FaultWatch watch;
    is_running = true;
    entry = &of;
    kernel = name;
    parameters = given;
    uint64_t seed = setting("NVIDIA_EMULATOR_SEED") * 1000003 + launches++ * 7919;
    begin_grid(shape.order, shape.may_overlap && delays());
    // Blocks come in any order: from some on, and by a step that meets all.
    int blocks = shape.blocks, first = (int)(seed * 31 % blocks), step = blocks % 7 != 0 ? 7 : 1;
    for (int i = 0; i < blocks; i++) {
        int block = (int)((first + (int64_t)i * step) % blocks);
        here = {0, shape.threads, block, blocks, block % shape.cluster, nullptr};
        reset_shared(shape.shared_bytes, of.static_begin, of.static_end);
        reset_barriers(shape.threads);
        reset_copies(shape.threads);
        reset_products(shape.threads);
        run_block(seed + (uint64_t)here.block);
    }
    end_grid();
    is_running = false;
}

}  // namespace machine
