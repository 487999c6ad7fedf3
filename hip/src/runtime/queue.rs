//! Streams, events, modules, captures and graphs.

use super::*;

impl Hip {
    // --- streams and events ---

    /// Makes a stream on the current device, with `hipStreamDefault` or `hipStreamNonBlocking`.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn stream_create(&self, flags: c_uint) -> Result<hipStream_t> {
        get!(self, hipStreamCreateWithFlags(ptr::null_mut(), flags))
    }

    /// Makes a stream with a priority; smaller numbers go first.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn stream_create_with_priority(&self, flags: c_uint, priority: i32) -> Result<hipStream_t> {
        get!(self, hipStreamCreateWithPriority(ptr::null_mut(), flags, priority))
    }

    /// Destroys a stream; its work goes on.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `stream` came from this runtime and is not used again.
    pub unsafe fn stream_destroy(&self, stream: hipStream_t) -> Result<()> {
        call!(self, hipStreamDestroy(stream))
    }

    /// Waits for a stream's work.
    ///
    /// # Errors
    /// [`Error::Hip`], those of earlier work included.
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn stream_synchronize(&self, stream: hipStream_t) -> Result<()> {
        call!(self, hipStreamSynchronize(stream))
    }

    /// Whether a stream's work has ended.
    ///
    /// # Errors
    /// [`Error::Hip`], those of earlier work included.
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn stream_is_idle(&self, stream: hipStream_t) -> Result<bool> {
        ready(call!(self, hipStreamQuery(stream)))
    }

    /// Makes what is enqueued later wait for an event.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// Both are live.
    pub unsafe fn stream_wait_event(&self, stream: hipStream_t, event: hipEvent_t) -> Result<()> {
        call!(self, hipStreamWaitEvent(stream, event, 0))
    }

    /// Makes an event, with flags `hipEvent*`.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn event_create(&self, flags: c_uint) -> Result<hipEvent_t> {
        get!(self, hipEventCreateWithFlags(ptr::null_mut(), flags))
    }

    /// Destroys an event.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `event` came from this runtime and is not used again.
    pub unsafe fn event_destroy(&self, event: hipEvent_t) -> Result<()> {
        call!(self, hipEventDestroy(event))
    }

    /// Puts an event into a stream.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// Both are live.
    pub unsafe fn event_record(&self, event: hipEvent_t, stream: hipStream_t) -> Result<()> {
        call!(self, hipEventRecord(event, stream))
    }

    /// Waits for an event.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `event` is live.
    pub unsafe fn event_synchronize(&self, event: hipEvent_t) -> Result<()> {
        call!(self, hipEventSynchronize(event))
    }

    /// Whether an event has come.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `event` is live.
    pub unsafe fn event_has_come(&self, event: hipEvent_t) -> Result<bool> {
        ready(call!(self, hipEventQuery(event)))
    }

    /// Milliseconds between two events that have come.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// Both are live.
    pub unsafe fn event_elapsed_ms(&self, start: hipEvent_t, stop: hipEvent_t) -> Result<f32> {
        get!(self, hipEventElapsedTime(0.0, start, stop))
    }

    // --- modules ---

    /// Loads a code object on the current device.
    ///
    /// # Errors
    /// [`Error::Hip`]: [`HipError::NO_BINARY_FOR_GPU`], [`HipError::INVALID_IMAGE`] and others, by release.
    ///
    /// # Safety
    /// `image` is a whole code object or bundle, whose end the library finds by its own headers, and stays as it is for as long
    /// as the module is loaded: the library does not copy it.
    pub unsafe fn module_load(&self, image: &[u8]) -> Result<hipModule_t> {
        get!(self, hipModuleLoadData(ptr::null_mut(), image.as_ptr().cast()))
    }

    /// Unloads a module.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `module` came from this runtime; no work uses its kernels any more.
    pub unsafe fn module_unload(&self, module: hipModule_t) -> Result<()> {
        call!(self, hipModuleUnload(module))
    }

    /// Finds a kernel by name.
    ///
    /// # Errors
    /// [`Error::Hip`] with [`HipError::NOT_FOUND`].
    ///
    /// # Safety
    /// `module` is live.
    pub unsafe fn module_function(&self, module: hipModule_t, name: &str) -> Result<hipFunction_t> {
        let name = c_string("name", name)?;
        get!(self, hipModuleGetFunction(ptr::null_mut(), module, name.as_ptr()))
    }

    /// Finds a global variable by name: its address and bytes.
    ///
    /// # Errors
    /// [`Error::Hip`] with [`HipError::NOT_FOUND`].
    ///
    /// # Safety
    /// `module` is live.
    pub unsafe fn module_global(&self, module: hipModule_t, name: &str) -> Result<(hipDeviceptr_t, usize)> {
        let name = c_string("name", name)?;
        let (mut address, mut bytes) = (ptr::null_mut(), 0);
        call!(self, hipModuleGetGlobal(&mut address, &mut bytes, module, name.as_ptr()))?;
        Ok((address, bytes))
    }

    /// One fact of a kernel (`HIP_FUNC_ATTRIBUTE_*`).
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `function` is of a live module.
    pub unsafe fn function_attribute(&self, function: hipFunction_t, attribute: hipFunction_attribute) -> Result<i32> {
        get!(self, hipFuncGetAttribute(0, attribute, function))
    }

    /// Blocks of a kernel that are resident on one compute unit.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `function` is of a live module.
    pub unsafe fn blocks_per_unit(&self, function: hipFunction_t, threads: u32, shared_bytes: usize) -> Result<u32> {
        let threads = index(threads as usize);
        let blocks: c_int =
            get!(self, hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(0, function, threads, shared_bytes))?;
        Ok(blocks.max(0) as u32)
    }

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// Function and stream are live; `node.params` has a pointer to each argument; the kernel's own demands are met.
    pub unsafe fn launch(&self, node: &KernelNode, stream: hipStream_t) -> Result<()> {
        let KernelNode { function, grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes, params } = *node;
        call!(
            self,
            hipModuleLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, ptr::null_mut())
        )
    }

    // --- capture and graphs ---

    /// Starts recording a stream, with a mode `hipStreamCaptureMode*`.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn begin_capture(&self, stream: hipStream_t, mode: hipStreamCaptureMode) -> Result<()> {
        call!(self, hipStreamBeginCapture(stream, mode))
    }

    /// Ends recording and gives the graph, which the caller destroys.
    ///
    /// # Errors
    /// [`Error::Hip`] when the capture was broken. Releases up to 7 at least then leave the stream invalidated, so that it
    /// refuses all work; [`Hip::reset_capture`] mends that.
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn end_capture(&self, stream: hipStream_t) -> Result<hipGraph_t> {
        let mut graph = ptr::null_mut();
        call!(self, hipStreamEndCapture(stream, &mut graph))?;
        Ok(graph)
    }

    /// Frees a stream whose capture was broken and ended, and gives its status afterwards.
    ///
    /// The runtime lets a capture begin on an invalidated stream, and ending an empty one resets it.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn reset_capture(&self, stream: hipStream_t) -> Result<hipStreamCaptureStatus> {
        // SAFETY: the caller's promise; the empty graph is ours.
        unsafe {
            if self.capture_status(stream)? == hipStreamCaptureStatusInvalidated {
                self.begin_capture(stream, hipStreamCaptureModeRelaxed)?;
                self.graph_destroy(self.end_capture(stream)?)?;
            }
            self.capture_status(stream)
        }
    }

    /// `hipStreamCaptureStatusNone`, `Active` or `Invalidated`.
    ///
    /// Releases before ROCm 7.14 let calls pass that are illegal while capturing, and break the capture silently: ask this first.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn capture_status(&self, stream: hipStream_t) -> Result<hipStreamCaptureStatus> {
        let mut status = 0;
        call!(self, hipStreamIsCapturing(stream, &mut status))?;
        Ok(status)
    }

    /// As [`Hip::capture_status`], with the number of the capture.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `stream` is live.
    pub unsafe fn capture_info(&self, stream: hipStream_t) -> Result<(hipStreamCaptureStatus, u64)> {
        let (mut status, mut id) = (0, 0);
        call!(self, hipStreamGetCaptureInfo(stream, &mut status, &mut id))?;
        Ok((status, id))
    }

    /// Sets this thread's capture mode and gives the one it had.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn exchange_capture_mode(&self, mode: hipStreamCaptureMode) -> Result<hipStreamCaptureMode> {
        get!(self, hipThreadExchangeStreamCaptureMode(mode))
    }

    /// Makes a graph executable. The graph may be destroyed afterwards.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `graph` is live.
    pub unsafe fn graph_instantiate(&self, graph: hipGraph_t) -> Result<hipGraphExec_t> {
        let (no_node, no_log) = (ptr::null_mut(), ptr::null_mut());
        get!(self, hipGraphInstantiate(ptr::null_mut(), graph, no_node, no_log, 0))
    }

    /// Moves an executable graph to the device, so that its first launch costs no more than later ones.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`] before HIP 5.4.
    ///
    /// # Safety
    /// Both are live.
    pub unsafe fn graph_upload(&self, exec: hipGraphExec_t, stream: hipStream_t) -> Result<()> {
        call!(self, optional hipGraphUpload(exec, stream))
    }

    /// Enqueues an executable graph.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// Both are live, and so is everything that the graph's nodes use.
    pub unsafe fn graph_launch(&self, exec: hipGraphExec_t, stream: hipStream_t) -> Result<()> {
        call!(self, hipGraphLaunch(exec, stream))
    }

    /// Destroys a graph.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `graph` came from this runtime and is not used again.
    pub unsafe fn graph_destroy(&self, graph: hipGraph_t) -> Result<()> {
        call!(self, hipGraphDestroy(graph))
    }

    /// Destroys an executable graph.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `exec` came from this runtime, none of its launches is running, and it is not used again.
    pub unsafe fn graph_exec_destroy(&self, exec: hipGraphExec_t) -> Result<()> {
        call!(self, hipGraphExecDestroy(exec))
    }

    /// A graph's nodes, live as long as it is.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `graph` is live.
    pub unsafe fn graph_nodes(&self, graph: hipGraph_t) -> Result<Vec<hipGraphNode_t>> {
        let mut count = 0;
        call!(self, hipGraphGetNodes(graph, ptr::null_mut(), &mut count))?;
        let mut nodes = vec![ptr::null_mut(); count];
        if count > 0 {
            call!(self, hipGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count))?;
            nodes.truncate(count);
        }
        Ok(nodes)
    }

    /// A node's kind.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `node` is of a live graph.
    pub unsafe fn node_kind(&self, node: hipGraphNode_t) -> Result<GraphNodeKind> {
        let mut raw = 0;
        call!(self, hipGraphNodeGetType(node, &mut raw))?;
        let one_based = self.runtime_version()? < Version { major: 5, minor: 3, patch: 0 };
        Ok(GraphNodeKind::from_raw(raw, one_based, self.api.hipGraphMemFreeNodeGetParams.is_some()))
    }

    /// The graph inside a node of kind [`GraphNodeKind::Graph`], which belongs to its parent.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `node` is such a node of a live graph.
    pub unsafe fn child_graph(&self, node: hipGraphNode_t) -> Result<hipGraph_t> {
        let mut graph = ptr::null_mut();
        call!(self, hipGraphChildGraphNodeGetGraph(node, &mut graph))?;
        Ok(graph)
    }

    /// What a kernel node launches. The pointers to its arguments are the library's, valid until the node changes.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `node` is a kernel node of a live graph.
    pub unsafe fn kernel_node(&self, node: hipGraphNode_t) -> Result<KernelNode> {
        // SAFETY: a struct of integers and pointers, for which zeros are values.
        let mut params: hipKernelNodeParams = unsafe { std::mem::zeroed() };
        call!(self, hipGraphKernelNodeGetParams(node, &mut params))?;
        Ok(params.into())
    }

    /// Changes what a kernel node launches.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `node` is a kernel node of a live graph; else as [`Hip::launch`].
    pub unsafe fn set_kernel_node(&self, node: hipGraphNode_t, launch: &KernelNode) -> Result<()> {
        call!(self, hipGraphKernelNodeSetParams(node, &(*launch).into()))
    }

    /// Changes what a kernel node of an executable graph launches from now on.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `node` is a kernel node of the live graph that `exec` was made from; else as [`Hip::launch`].
    pub unsafe fn set_exec_kernel_node(
        &self,
        exec: hipGraphExec_t,
        node: hipGraphNode_t,
        launch: &KernelNode,
    ) -> Result<()> {
        call!(self, hipGraphExecKernelNodeSetParams(exec, node, &(*launch).into()))
    }

    /// Bytes that a device's graphs hold.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`].
    pub fn graph_memory(&self, device: usize) -> Result<u64> {
        let mut bytes = 0u64;
        let value = (&raw mut bytes).cast();
        let attribute = hipGraphMemAttrReservedMemCurrent;
        call!(self, optional hipDeviceGetGraphMemAttribute(index(device), attribute, value))?;
        Ok(bytes)
    }
}

fn ready(queried: Result<()>) -> Result<bool> {
    match queried {
        Ok(()) => Ok(true),
        Err(Error::Hip { code: HipError::NOT_READY, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
