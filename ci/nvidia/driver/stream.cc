// Streams, whose work is done at once; events; captures and graphs.

#include <pthread.h>

#include "../machine/inner.h"
#include "cuda.h"

Handles<Stream> streams;
Handles<Event> events;
Handles<Executable> executables;

namespace {

Handles<std::shared_ptr<Graph>> graphs;
std::set<std::shared_ptr<Capture>> captures;
thread_local CaptureMode thread_mode = CAPTURE_GLOBAL;

uint64_t this_thread() { return (uint64_t)pthread_self(); }

/// Handles of the streams that are always there: the legacy one by either of its names, and each thread's.
bool is_legacy(const Stream* handle) { return (uint64_t)handle <= 1; }

/// The host has waited, or seen that it need not.
Status waited() {
    Status status = outside_capture();
    if (status == SUCCESS) machine::grids_apart();
    return status;
}

/// Does what is no kernel's work, before all that come after it; what touches device memory beside no kernel.
void do_apart(NodeKind kind, const std::function<void()>& act) {
    machine::grids_apart();
    if (kind != COPY_NODE && kind != FILL_NODE) return act();
    std::lock_guard lock(machine::one_grid_at_a_time);
    act();
}

}  // namespace

void Graph::run() const {
    machine::grids_apart();
    for (auto& node : nodes) node->kind == KERNEL_NODE ? node->act() : do_apart(node->kind, node->act);
    machine::grids_apart();
}

Stream* stream_of(Stream* handle) {
    static Stream legacy;
    static thread_local Stream own;
    if (is_legacy(handle)) return &legacy;
    if ((uint64_t)handle == 2) return &own;
    return streams.has(handle) ? handle : nullptr;
}

Status outside_capture() {
    if (Status status = current()) return status;
    if (thread_mode == CAPTURE_RELAXED) return SUCCESS;
    Status status = SUCCESS;
    for (auto& capture : captures) {
        bool mine = capture->thread == this_thread() && capture->mode != CAPTURE_RELAXED;
        if (mine || (thread_mode == CAPTURE_GLOBAL && capture->mode == CAPTURE_GLOBAL)) {
            capture->broken = true;
            status = CAPTURE_UNSUPPORTED;
        }
    }
    return status;
}

Status enqueue(Stream* handle, NodeKind kind, std::function<void()> act, std::shared_ptr<Graph> child) {
    if (Status status = current()) return status;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    auto& capture = stream->capture;
    if (!capture) {
        do_apart(kind, act);
        return SUCCESS;
    }
    if (capture->broken) return CAPTURE_INVALIDATED;
    if (stream != capture->origin) capture->drawn_in.insert(stream);
    capture->graph->nodes.push_back(std::make_unique<Node>(Node{kind, std::move(act), std::move(child)}));
    return SUCCESS;
}

extern "C" {

// ---- streams ----

int cuStreamCreate(Stream** stream, unsigned) {
    std::lock_guard lock(driver_lock);
    if (Status status = current()) return status;
    *stream = streams.add(std::make_unique<Stream>());
    return SUCCESS;
}

int cuStreamDestroy_v2(Stream* stream) {
    std::lock_guard lock(driver_lock);
    if (!streams.has(stream)) return INVALID_HANDLE;
    if (stream->capture) {
        stream->capture->broken = true;
        captures.erase(stream->capture);
    }
    machine::grids_apart();
    streams.remove(stream);
    return SUCCESS;
}

int cuStreamSynchronize(Stream* handle) {
    std::lock_guard lock(driver_lock);
    if (Status status = current()) return status;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!stream->capture) return waited();
    stream->capture->broken = true;
    return CAPTURE_UNSUPPORTED;
}

int cuStreamWaitEvent(Stream* handle, Event* event, unsigned) {
    std::lock_guard lock(driver_lock);
    Stream* stream = stream_of(handle);
    if (!stream || !events.has(event)) return INVALID_HANDLE;
    if (!event->capture) return SUCCESS;
    if (stream->capture && stream->capture != event->capture) return CAPTURE_UNMATCHED;
    if (!stream->capture) {
        stream->capture = event->capture;
        event->capture->drawn_in.insert(stream);
    } else {
        event->capture->drawn_in.erase(event->of);
    }
    return SUCCESS;
}

int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
    std::lock_guard lock(driver_lock);
    return enqueue(stream, HOST_NODE, [=] { function(data); });
}

// ---- events ----

int cuEventCreate(Event** event, unsigned) {
    std::lock_guard lock(driver_lock);
    if (Status status = current()) return status;
    *event = events.add(std::make_unique<Event>());
    return SUCCESS;
}

int cuEventDestroy_v2(Event* event) {
    std::lock_guard lock(driver_lock);
    return events.remove(event) ? SUCCESS : INVALID_HANDLE;
}

int cuEventRecord(Event* event, Stream* handle) {
    std::lock_guard lock(driver_lock);
    if (Status status = current()) return status;
    Stream* stream = stream_of(handle);
    if (!stream || !events.has(event)) return INVALID_HANDLE;
    if (stream->capture && stream->capture->broken) return CAPTURE_INVALIDATED;
    *event = {stream->capture, stream};
    return SUCCESS;
}

int cuEventQuery(Event* event) {
    std::lock_guard lock(driver_lock);
    if (!events.has(event)) return INVALID_HANDLE;
    if (event->capture) return CAPTURED_EVENT;
    return waited();
}

int cuEventSynchronize(Event* event) { return cuEventQuery(event); }

// ---- captures ----

int cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return INVALID_VALUE;
    std::swap(*mode, thread_mode);
    return SUCCESS;
}

int cuStreamIsCapturing(Stream* handle, int* status) {
    std::lock_guard lock(driver_lock);
    if (Status status = current()) return status;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    *status = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
    return SUCCESS;
}

int cuStreamBeginCapture_v2(Stream* handle, CaptureMode mode) {
    std::lock_guard lock(driver_lock);
    if (Status status = current()) return status;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (is_legacy(handle)) return CAPTURE_UNSUPPORTED;
    if (stream->capture) return ILLEGAL_STATE;
    stream->capture = std::make_shared<Capture>(Capture{stream, mode, this_thread(), false, std::make_shared<Graph>(), {}});
    captures.insert(stream->capture);
    return SUCCESS;
}

int cuStreamEndCapture(Stream* handle, std::shared_ptr<Graph>** graph) {
    std::lock_guard lock(driver_lock);
    *graph = nullptr;
    if (Status status = current()) return status;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    auto capture = stream->capture;
    if (!capture) return ILLEGAL_STATE;
    if (capture->origin != stream) return CAPTURE_UNMATCHED;
    if (capture->mode != CAPTURE_RELAXED && capture->thread != this_thread()) return CAPTURE_WRONG_THREAD;
    captures.erase(capture);
    stream->capture = nullptr;
    for (Stream* other : capture->drawn_in) {
        if (streams.has(other)) other->capture = nullptr;
    }
    if (capture->broken) return CAPTURE_INVALIDATED;
    if (!capture->drawn_in.empty()) return CAPTURE_UNJOINED;
    *graph = graphs.add(std::make_unique<std::shared_ptr<Graph>>(capture->graph));
    return SUCCESS;
}

// ---- graphs ----

int cuGraphGetNodes(std::shared_ptr<Graph>* graph, Node** nodes, size_t* count) {
    std::lock_guard lock(driver_lock);
    if (!graphs.has(graph)) return INVALID_VALUE;
    auto& all = (*graph)->nodes;
    for (size_t i = 0; nodes && i < std::min(*count, all.size()); i++) nodes[i] = all[i].get();
    *count = all.size();
    return SUCCESS;
}

int cuGraphNodeGetType(const Node* node, int* kind) {
    *kind = node->kind;
    return SUCCESS;
}

int cuGraphChildGraphNodeGetGraph(Node* node, std::shared_ptr<Graph>** graph) {
    std::lock_guard lock(driver_lock);
    if (node->kind != GRAPH_NODE) return INVALID_VALUE;
    // Owned by the node in the real driver; here a handle more.
    *graph = graphs.add(std::make_unique<std::shared_ptr<Graph>>(node->child));
    return SUCCESS;
}

int cuGraphDestroy(std::shared_ptr<Graph>* graph) {
    std::lock_guard lock(driver_lock);
    return graphs.remove(graph) ? SUCCESS : INVALID_VALUE;
}

int cuGraphInstantiateWithFlags(Executable** executable, std::shared_ptr<Graph>* graph, unsigned long long) {
    std::lock_guard lock(driver_lock);
    if (Status status = outside_capture()) return status;
    if (!graphs.has(graph)) return INVALID_VALUE;
    *executable = executables.add(std::make_unique<Executable>(Executable{*graph}));
    return SUCCESS;
}

int cuGraphUpload(Executable* executable, Stream* stream) {
    std::lock_guard lock(driver_lock);
    return executables.has(executable) && stream_of(stream) ? SUCCESS : INVALID_HANDLE;
}

int cuGraphLaunch(Executable* executable, Stream* stream) {
    std::shared_ptr<const Graph> graph;
    {
        std::lock_guard lock(driver_lock);
        if (!executables.has(executable)) return INVALID_HANDLE;
        graph = executable->graph;
        Stream* of = stream_of(stream);
        if (!of || of->capture) return enqueue(stream, GRAPH_NODE, [graph] { graph->run(); }, std::const_pointer_cast<Graph>(graph));
    }
    if (Status status = current()) return status;
    graph->run();
    return SUCCESS;
}

int cuGraphExecDestroy(Executable* executable) {
    std::lock_guard lock(driver_lock);
    return executables.remove(executable) ? SUCCESS : INVALID_HANDLE;
}

}  // extern "C"
