/* The runtime's API (libcudart): as much as torch and vLLM ask for, over the driver's. */

#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local cudaError_t last_error;

cudaError_t note(int code) {
    if (code) last_error = (cudaError_t)code;
    return (cudaError_t)code;
}

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorName(cudaError_t error) { return error_name((int)error); }
EXPORT const char *cudaGetErrorString(cudaError_t error) { return error_text((int)error); }

/* The device. */

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) { return CALL(device ? INVALID_DEVICE : OK); }
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return note(device ? INVALID_DEVICE : device_attribute(value, (int)attribute));
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    (void)device;
    snprintf(id, (size_t)length, "0000:01:00.0");
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device;
    (void)peer;
    *can = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
    return CALL(device_synchronize("cudaDeviceSynchronize"));
}
EXPORT cudaError_t cudaDeviceReset(void) { return CALL(refuse(NOT_SUPPORTED, "cudaDeviceReset")); }

/* The dimensions are an H200's. */
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    size_t unused, total_bytes;
    if (enter_context() || device) return note(INVALID_DEVICE);
    card_memory_info(&unused, &total_bytes);
    *found = (struct cudaDeviceProp){
        .name = CARD_NAME,
        .totalGlobalMem = total_bytes,
        .major = 9,
        .multiProcessorCount = 132,
        .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .l2CacheSize = 62914560,
        .textureAlignment = 512,
        .unifiedAddressing = 1,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .pciBusID = 1,
    };
    return cudaSuccess;
}

/* Memory. */

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    int code = enter_context();
    if (code == OK) card_memory_info(free_bytes, total_bytes);
    return note(code);
}

static int allocate(void **address, size_t size) {
    int code = begin_unsafe("cudaMalloc");
    *address = NULL;
    return code || !size ? code : card_allocate((uint64_t *)address, size);
}
EXPORT cudaError_t cudaMalloc(void **address, size_t size) { return CALL(allocate(address, size)); }

static int give_back(void *address) {
    int code = begin_unsafe("cudaFree");
    return code || !address ? code : card_free((uint64_t)address);
}
EXPORT cudaError_t cudaFree(void *address) { return CALL(give_back(address)); }

static int allocate_host(void **address, size_t size) {
    int code = begin_unsafe("cudaHostAlloc");
    return code ? code : card_allocate_host(address, size);
}
EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    return CALL(allocate_host(address, size));
}

static int free_host(void *address) {
    int code = begin_unsafe("cudaFreeHost");
    return code ? code : card_free_host(address);
}
EXPORT cudaError_t cudaFreeHost(void *address) { return CALL(free_host(address)); }

static int pin(void *address, size_t size) {
    int code = begin_unsafe("cudaHostRegister");
    return code ? code : card_register((uint64_t)address, size);
}
EXPORT cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    (void)flags;
    return CALL(pin(address, size));
}

static int unpin(void *address) {
    int code = begin_unsafe("cudaHostUnregister");
    return code ? code : card_unregister((uint64_t)address);
}
EXPORT cudaError_t cudaHostUnregister(void *address) { return CALL(unpin(address)); }

EXPORT cudaError_t cudaHostGetDevicePointer(void **address, void *host, unsigned flags) {
    (void)flags;
    *address = host;
    return CALL(card_is_pinned((uint64_t)host, 1) == 1
                    ? OK
                    : refuse(INVALID_VALUE, "cudaHostGetDevicePointer: %p is not pinned", host));
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (card_is_device((uint64_t)address, 1) == 1) {
        found->type = cudaMemoryTypeDevice;
    } else if (card_is_pinned((uint64_t)address, 1) == 1) {
        found->type = cudaMemoryTypeHost;
        found->hostPointer = (void *)address;
    } else {
        return CALL(OK);
    }
    found->device = 0;
    found->devicePointer = (void *)address;
    return CALL(OK);
}

static int copy_now(void *target, const void *source, size_t size) {
    int code = begin_unsafe("cudaMemcpy");
    return code ? code : card_copy((uint64_t)target, (uint64_t)source, size, ANY_WAY);
}
EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    (void)kind;
    return CALL(copy_now(target, source, size));
}

static int copy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind, void *stream) {
    static const enum direction ways[] = {ANY_WAY, TO_DEVICE, TO_HOST, ANY_WAY, ANY_WAY};
    bool is_captured;
    int code = begin_work(stream, &is_captured);
    if (code || is_captured) return code;
    return card_copy((uint64_t)target, (uint64_t)source, size, ways[kind]);
}
EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size,
                                   enum cudaMemcpyKind kind, cudaStream_t stream) {
    return CALL(copy(target, source, size, kind, stream));
}

static int copy_rows(char *target, size_t target_pitch, const char *source, size_t source_pitch,
                     size_t width, size_t height, enum cudaMemcpyKind kind, void *stream) {
    int code = OK;
    for (size_t row = 0; code == OK && row < height; row++) {
        code = copy(target + row * target_pitch, source + row * source_pitch, width, kind, stream);
    }
    return code;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source,
                                     size_t source_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
    return CALL(copy_rows(target, target_pitch, source, source_pitch, width, height, kind, stream));
}

static int fill_now(void *target, int value, size_t size) {
    int code = begin_unsafe("cudaMemset");
    return code ? code : card_fill((uint64_t)target, (unsigned char)value, 1, size);
}
EXPORT cudaError_t cudaMemset(void *target, int value, size_t size) {
    return CALL(fill_now(target, value, size));
}

static int fill(void *target, int value, size_t size, void *stream) {
    bool is_captured;
    int code = begin_work(stream, &is_captured);
    if (code || is_captured) return code;
    return card_fill((uint64_t)target, (unsigned char)value, 1, size);
}
EXPORT cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    return CALL(fill(target, value, size, stream));
}

/* Streams and events. */

#define HANDLE(pointer) ((void **)(pointer))

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return CALL(stream_create(HANDLE(stream), 0, 0));
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return CALL(stream_create(HANDLE(stream), flags, priority));
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return CALL(stream_destroy(stream)); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return CALL(stream_priority(stream, priority));
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return CALL(stream_synchronize(stream, "cudaStreamSynchronize"));
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return CALL(stream_synchronize(stream, "cudaStreamQuery"));
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return CALL(stream_wait(stream, event, flags));
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return CALL(event_create(HANDLE(event), 0)); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return CALL(event_create(HANDLE(event), flags));
}
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return CALL(event_destroy(event)); }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return CALL(event_record(event, stream, 0));
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return CALL(event_record(event, stream, flags));
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    return CALL(event_query(event, "cudaEventQuery"));
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return CALL(event_query(event, "cudaEventSynchronize"));
}
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return CALL(event_elapsed(milliseconds, start, end));
}
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    return CALL(event_export(handle->reserved, event));
}
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    return CALL(event_import(HANDLE(event), handle.reserved));
}

/* Host functions of a graph are not called when it is launched: its kernels do nothing either. */
static int call_host(void (*function)(void *), void *argument, void *stream) {
    bool is_captured;
    int code = begin_work(stream, &is_captured);
    if (code == OK && !is_captured) function(argument);
    return code;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return CALL(call_host(function, argument, stream));
}

/* Graphs. */

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return CALL(capture_begin(stream, (int)mode));
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    return CALL(capture_end(stream, HANDLE(graph)));
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return CALL(capture_info(stream, (int *)status, NULL));
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return CALL(capture_info(stream, (int *)status, id));
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    return CALL(capture_exchange_mode((int *)mode));
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                                 unsigned long long flags) {
    (void)flags;
    return CALL(graph_instantiate(HANDLE(made), graph));
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return CALL(graph_launch(graph, stream));
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return CALL(nodes ? refuse(NOT_SUPPORTED, "the nodes of a graph")
                      : graph_num_nodes(graph, count));
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return CALL(graph_destroy(graph)); }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return CALL(graph_destroy(graph)); }
