/* The driver's API (libcuda.so.1) but for the device's memory, which is in memory.c. */

#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VERSION 13000

static pid_t process; /* that has called cuInit */
static int num_retained;
static char context; /* the only one */
static _Thread_local void *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int refuse(int code, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "fake card: %s: error %d, %s\n", text, code, error_name(code));
    return code;
}

int check_process(void) {
    if (process == getpid()) return OK;
    return refuse(NOT_INITIALIZED, process ? "CUDA was begun before a fork" : "no cuInit yet");
}

int check_context(void) {
    int code = check_process();
    if (code) return code;
    return current ? OK : refuse(INVALID_CONTEXT, "this thread has no context");
}

EXPORT int cuInit(unsigned flags) {
    int code = flags ? INVALID_VALUE : OK;
    pthread_mutex_lock(&lock);
    if (process && process != getpid()) {
        code = refuse(NOT_INITIALIZED, "cuInit: CUDA was begun before a fork");
    } else if (!process && code == OK) {
        code = card_init_memory();
        if (code == OK) process = getpid();
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* Devices and contexts. */

EXPORT int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return OK;
}

EXPORT int cuDeviceGetCount(int *count) {
    *count = 1;
    return check_process();
}

EXPORT int cuDeviceGet(int *device, int index) {
    if (index) return refuse(INVALID_DEVICE, "there is no device %d", index);
    *device = 0;
    return check_process();
}

EXPORT int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "%s", CARD_NAME);
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(char *uuid, int device) {
    (void)device;
    memset(uuid, 0, 16);
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    size_t unused;
    (void)device;
    card_memory_info(&unused, bytes);
    return check_process();
}

EXPORT int cuDeviceGetPCIBusId(char *id, int length, int device) {
    (void)device;
    memset(id, 0, (size_t)length);
    snprintf(id, (size_t)length, "0000:01:00.0");
    return OK;
}

/* As of an H200, where anything asks. */
int device_attribute(int *value, int attribute) {
    static const int known[][2] = {
        {1, 1024},     {2, 1024},  {3, 1024},       {4, 64},     {5, 2147483647}, {6, 65535},
        {7, 65535},    {8, 49152}, {10, 32},        {12, 65536}, {13, 1980000},   {16, 132},
        {20, 0},       {36, 3201000}, {37, 6144},   {38, 62914560}, {39, 2048},   {75, 9},
        {76, 0},       {81, 233472}, {82, 65536},   {97, 232448}, {106, 32},
    };
    *value = 1; /* most others are questions */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i][0] == attribute) *value = known[i][1];
    }
    return OK;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device) return refuse(INVALID_DEVICE, "there is no device %d", device);
    return device_attribute(value, attribute);
}

EXPORT int cuDevicePrimaryCtxRetain(void **made, int device) {
    int code = device ? refuse(INVALID_DEVICE, "there is no device %d", device) : check_process();
    if (code) return code;
    pthread_mutex_lock(&lock);
    if (num_retained++ == 0) card_take_context_bytes();
    pthread_mutex_unlock(&lock);
    *made = &context;
    return OK;
}

/* The context stays when nobody retains it: so does what it has. */
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    return device ? INVALID_DEVICE : check_process();
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    (void)device;
    *flags = 0;
    *is_active = process == getpid() && num_retained > 0;
    return OK;
}

int enter_context(void) {
    int code = cuInit(0);
    if (code || current) return code;
    void *made;
    if (num_retained) current = &context;
    else if ((code = cuDevicePrimaryCtxRetain(&made, 0)) == OK) current = made;
    return code;
}

EXPORT int cuCtxSetCurrent(void *wanted) {
    current = wanted;
    return check_process();
}

EXPORT int cuCtxGetCurrent(void **found) {
    *found = current;
    return OK;
}

EXPORT int cuCtxGetDevice(int *device) {
    *device = 0;
    return check_context();
}

EXPORT int cuCtxSetLimit(int limit, size_t value) {
    (void)limit, (void)value;
    return check_context();
}

EXPORT int cuCtxGetLimit(size_t *value, int limit) {
    (void)limit;
    *value = 0;
    return check_context();
}

EXPORT int cuCtxSynchronize(void) { return device_synchronize("cuCtxSynchronize"); }

/* Plain allocations, host memory. */

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    int code = check_context();
    if (code == OK) card_memory_info(free_bytes, total_bytes);
    return code;
}

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t size) {
    int code = begin_unsafe("cuMemAlloc");
    return code ? code : card_allocate(address, size);
}

EXPORT int cuMemFree_v2(uint64_t address) {
    int code = begin_unsafe("cuMemFree");
    return code || !address ? code : card_free(address);
}

EXPORT int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    (void)flags;
    int code = begin_unsafe("cuMemHostRegister");
    return code ? code : card_register((uint64_t)address, size);
}

EXPORT int cuMemHostUnregister(void *address) {
    int code = begin_unsafe("cuMemHostUnregister");
    return code ? code : card_unregister((uint64_t)address);
}

EXPORT int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    int code = begin_unsafe("cuMemHostAlloc");
    return code ? code : card_allocate_host(address, size);
}

EXPORT int cuMemFreeHost(void *address) {
    int code = begin_unsafe("cuMemFreeHost");
    return code ? code : card_free_host(address);
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned flags) {
    (void)flags;
    if (card_is_pinned((uint64_t)host, 1) != 1) return refuse(INVALID_VALUE, "%p is not pinned", host);
    *address = (uint64_t)host;
    return OK;
}

EXPORT int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 };
    bool is_device = card_is_device(address, 1) == 1;
    if (!is_device && card_is_pinned(address, 1) != 1) return INVALID_VALUE;
    if (attribute == MEMORY_TYPE) *(unsigned *)value = is_device ? 2 : 1;
    else if (attribute == DEVICE_POINTER) *(uint64_t *)value = address;
    else if (attribute == DEVICE_ORDINAL) *(int *)value = 0;
    else return refuse(NOT_SUPPORTED, "attribute %d of a pointer", attribute);
    return OK;
}

/* Copies. */

static int copy(uint64_t target, uint64_t source, size_t size, void *stream, enum direction way) {
    bool is_captured;
    int code = begin_work(stream, &is_captured);
    return code || is_captured ? code : card_copy(target, source, size, way);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
    return copy(target, (uint64_t)source, size, stream, TO_DEVICE);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
    return copy((uint64_t)target, source, size, stream, TO_HOST);
}

EXPORT int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream) {
    return copy(target, source, size, stream, ANY_WAY);
}

struct copy_attributes {
    int order; /* more follows */
};

EXPORT int cuMemcpyBatchAsync_v2(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                                 struct copy_attributes *attributes, size_t *starts,
                                 size_t num_attributes, void *stream) {
    bool is_captured;
    if ((uintptr_t)stream <= 1) return refuse(INVALID_VALUE, "batch on the default stream");
    if (!count || !num_attributes || num_attributes > count || starts[0] || !attributes[0].order) {
        return refuse(INVALID_VALUE, "cuMemcpyBatchAsync: %zu copies without attributes", count);
    }
    for (size_t i = 0; i < count; i++) {
        if (!sizes[i]) return refuse(INVALID_VALUE, "cuMemcpyBatchAsync: copy %zu is empty", i);
    }
    int code = begin_work(stream, &is_captured);
    for (size_t i = 0; !is_captured && code == OK && i < count; i++) {
        code = card_copy(targets[i], sources[i], sizes[i], ANY_WAY);
    }
    return code;
}

EXPORT int cuMemsetD8Async(uint64_t target, unsigned char value, size_t count, void *stream) {
    bool is_captured;
    int code = begin_work(stream, &is_captured);
    return code || is_captured ? code : card_fill(target, value, 1, count);
}

EXPORT int cuMemsetD32Async(uint64_t target, unsigned value, size_t count, void *stream) {
    bool is_captured;
    int code = begin_work(stream, &is_captured);
    return code || is_captured ? code : card_fill(target, value, 4, count);
}

/* Streams, events, captures. */

EXPORT int cuStreamCreate(void **stream, unsigned flags) { return stream_create(stream, flags, 0); }
EXPORT int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    return stream_create(stream, flags, priority);
}
EXPORT int cuStreamDestroy_v2(void *stream) { return stream_destroy(stream); }
EXPORT int cuStreamSynchronize(void *stream) {
    return stream_synchronize(stream, "cuStreamSynchronize");
}
EXPORT int cuStreamQuery(void *stream) { return stream_synchronize(stream, "cuStreamQuery"); }
EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return stream_wait(stream, event, flags);
}
EXPORT int cuStreamIsCapturing(void *stream, int *status) {
    return capture_info(stream, status, NULL);
}
EXPORT int cuStreamBeginCapture_v2(void *stream, int mode) { return capture_begin(stream, mode); }
EXPORT int cuStreamEndCapture(void *stream, void **graph) { return capture_end(stream, graph); }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return capture_exchange_mode(mode); }
EXPORT int cuEventCreate(void **event, unsigned flags) { return event_create(event, flags); }
EXPORT int cuEventDestroy_v2(void *event) { return event_destroy(event); }
EXPORT int cuEventRecord(void *event, void *stream) { return event_record(event, stream, 0); }
EXPORT int cuEventQuery(void *event) { return event_query(event, "cuEventQuery"); }
EXPORT int cuEventSynchronize(void *event) { return event_query(event, "cuEventSynchronize"); }
EXPORT int cuIpcGetEventHandle(char *handle, void *event) { return event_export(handle, event); }

struct event_handle {
    char bytes[64];
};
EXPORT int cuIpcOpenEventHandle(void **event, struct event_handle handle) {
    int code = check_context();
    return code ? code : event_import(event, handle.bytes);
}

/* Texts and functions by name. */

const char *error_name(int code) {
    static const struct {
        int code;
        const char *name;
    } names[] = {
        {OK, "CUDA_SUCCESS"},
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {MAP_FAILED_CODE, "CUDA_ERROR_MAP_FAILED"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
        {CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE"},
        {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
        {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
        {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
        {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
        {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT"},
        {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].code == code) return names[i].name;
    }
    return "CUDA_ERROR_UNKNOWN";
}

const char *error_text(int code) { return code ? "the fake card refused this" : "no error"; }

EXPORT int cuGetErrorName(int code, const char **name) {
    *name = error_name(code);
    return OK;
}
EXPORT int cuGetErrorString(int code, const char **text) {
    *text = error_text(code);
    return OK;
}

void *find_function(const char *name) {
    static const char *const forms[] = {"_v3", "_v2", ""};
    static void *library;
    Dl_info here;
    if (!library && dladdr(&context, &here)) library = dlopen(here.dli_fname, RTLD_NOW);
    for (size_t i = 0; library && i < sizeof forms / sizeof *forms; i++) {
        char form[128];
        snprintf(form, sizeof form, "%s%s", name, forms[i]);
        void *found = dlsym(library, form);
        if (found) return found;
    }
    return NULL;
}

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                               int *status) {
    (void)version;
    (void)flags;
    *function = find_function(name);
    if (status) *status = *function ? 0 : 1; /* found, or no such symbol */
    return *function ? OK : NOT_FOUND;
}
