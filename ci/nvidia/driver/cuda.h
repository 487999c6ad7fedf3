// The part of the CUDA driver's binary interface that the library and its tests use, and what the driver's files share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "../machine/machine.h"

/// Status codes.
enum Status : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    INVALID_CLUSTER_SIZE = 912,
};

/// CUstreamCaptureMode
enum CaptureMode : int { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };

/// CUgraphNodeType
enum NodeKind : int { KERNEL_NODE = 0, COPY_NODE = 1, FILL_NODE = 2, HOST_NODE = 3, GRAPH_NODE = 4, ALLOC_NODE = 10 };

/// CUlaunchConfig and its attributes
struct LaunchAttribute {
    int id, reserved;
    char value[64];
};
struct LaunchConfig {
    uint32_t grid[3], block[3], shared_bytes;
    struct Stream* stream;
    const LaunchAttribute* attributes;
    uint32_t num_attributes;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "as in the driver's interface");

struct Graph;

/// Recorded work.
struct Node {
    NodeKind kind;
    std::function<void()> act;
    std::shared_ptr<Graph> child;
};
struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    void run() const;
};

/// A capture under way: of the stream it began on, and of those drawn in.
struct Capture {
    struct Stream* origin;
    CaptureMode mode;
    uint64_t thread;
    bool broken;
    std::shared_ptr<Graph> graph;
    std::set<struct Stream*> drawn_in;  // and not joined since its last work
};
struct Stream {
    std::shared_ptr<Capture> capture;
};
struct Event {
    // Recorded in a capture: there, of this stream.
    std::shared_ptr<Capture> capture;
    Stream* of = nullptr;
};
struct Executable {
    std::shared_ptr<const Graph> graph;
};
struct Module;
struct Function {
    Module* module;
    const machine::Entry* entry;
    std::string name;
    int dynamic_bytes;  // of shared memory, at most
};
struct Module {
    void* library;
    std::vector<std::unique_ptr<Function>> functions;
};

/// Live handles of a kind. All calls are made under `driver_lock`.
template <typename T>
class Handles {
public:
    T* add(std::unique_ptr<T> object) {
        T* handle = object.get();
        live[handle] = std::move(object);
        return handle;
    }
    bool has(const T* handle) const { return live.count(handle) != 0; }
    bool remove(const T* handle) { return live.erase(handle) != 0; }

private:
    std::unordered_map<const T*, std::unique_ptr<T>> live;
};

extern std::recursive_mutex driver_lock;
extern Handles<Stream> streams;
extern Handles<Event> events;
extern Handles<Module> modules;
extern Handles<Executable> executables;

/// What the device is: EMULATED_CAPABILITY, as 90, and so on.
struct Facts {
    int capability, multiprocessors;
    size_t shared_bytes;  // of a block, at most
    size_t memory_bytes;
};
const Facts& facts();

/// Whether this thread may call at all: the driver is initialised, and a context is current.
Status current();
/// Whether it may make a call that no capture allows; breaks those it would disturb.
Status outside_capture();

/// A stream by its handle, which may be one of the three that need not be created; null if there is none.
Stream* stream_of(Stream* handle);
/// Does work in stream order: now, or whenever the graph runs into which it is captured.
Status enqueue(Stream* handle, NodeKind kind, std::function<void()> act, std::shared_ptr<Graph> child = nullptr);
